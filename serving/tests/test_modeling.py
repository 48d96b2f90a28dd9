"""The modelling file against transformers' own families, at tiny sizes.

A model whose layers are all alike must give the logits that the plain family gives; one whose blocks differ must
generate the same with its cache as without, and every parameter must get a gradient.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

HERE = Path(__file__).resolve().parent.parent / "espalier_hf"
TOKENS = torch.tensor([[5, 17, 3, 44, 9, 60, 21, 2, 33, 8, 8, 19]])

BASE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "llama biased, llama3": {"attention_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3},
    "mistral window": {"sliding_window": 5},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 16},
}


def attention(heads, kv_heads, config, family):
    biased = family == "qwen2" or config.get("attention_bias", False)
    return {
        "type": "attention",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": config["head_dim"],
        "qkv_bias": biased,
        "output_bias": biased and family != "qwen2",
        "qk_norm": family == "qwen3",
        "sliding_window": config.get("sliding_window"),
    }


def mlp(size, config):
    return {"type": "mlp", "intermediate_size": size, "bias": config.get("mlp_bias", False)}


def flat_model(directory, config, family, blocks):
    """A random flat checkpoint, loaded the way a user loads it."""
    config = dict(config, model_type="espalier", family=family, blocks=blocks)
    config["architectures"] = ["EspalierForCausalLM"]
    config["auto_map"] = {
        "AutoConfig": "configuration_espalier.EspalierConfig",
        "AutoModel": "modeling_espalier.EspalierModel",
        "AutoModelForCausalLM": "modeling_espalier.EspalierForCausalLM",
    }
    for file in HERE.glob("*.py"):
        shutil.copy(file, directory)
    (directory / "config.json").write_text(json.dumps(config))
    loaded = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(loaded, trust_remote_code=True, dtype=torch.float32).eval()


def randomise(model):
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name else 0.0))


@pytest.mark.parametrize("attention_kind", ["eager", "sdpa"])
@pytest.mark.parametrize("case", FAMILIES)
def test_a_model_of_equal_layers_gives_the_logits_of_its_family(tmp_path, case, attention_kind):
    family = case.split()[0]
    config = {**BASE, **FAMILIES[case]}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config)).eval()
    randomise(plain)
    blocks = [attention(6, 2, config, family), mlp(80, config)] * 2
    flat = flat_model(tmp_path, config, family, blocks)
    state = {}
    for name, value in plain.state_dict().items():
        parts = name.split(".")
        if "layers" in parts:
            is_attention = "self_attn" in parts or "input_layernorm" in parts
            parts[2] = str(2 * int(parts[2]) + (0 if is_attention else 1))
        state[".".join(parts)] = value
    flat.load_state_dict(state)
    for model in (plain, flat):
        model.set_attn_implementation(attention_kind)
    with torch.no_grad():
        difference = (plain(TOKENS).logits - flat(TOKENS).logits).abs().max().item()
    assert difference < 1e-4, difference


def heterogeneous(directory, family="llama", config=None):
    config = config or {**BASE, "tie_word_embeddings": True}
    blocks = [
        mlp(40, config),
        attention(6, 2, config, family),
        attention(3, 1, config, family),
        mlp(80, config),
        mlp(16, config),
        attention(3, 1, config, family),
    ]
    model = flat_model(directory, config, family, blocks)
    randomise(model)
    return model


def test_blocks_of_every_size_generate_the_same_with_a_cache_as_without(tmp_path):
    model = heterogeneous(tmp_path)
    cached = model.generate(TOKENS, max_new_tokens=16, do_sample=False, use_cache=True, eos_token_id=None)
    plain = model.generate(TOKENS, max_new_tokens=16, do_sample=False, use_cache=False, eos_token_id=None)
    assert cached.shape[1] == TOKENS.shape[1] + 16
    assert cached.tolist() == plain.tolist()


def test_a_sliding_window_generates_the_same_with_a_cache_as_without(tmp_path):
    config = {**BASE, "sliding_window": 5}
    model = heterogeneous(tmp_path, "mistral", config)
    cached = model.generate(TOKENS, max_new_tokens=16, do_sample=False, use_cache=True, eos_token_id=None)
    plain = model.generate(TOKENS, max_new_tokens=16, do_sample=False, use_cache=False, eos_token_id=None)
    assert cached.tolist() == plain.tolist()


@pytest.mark.parametrize("window", [None, 5])
def test_a_cache_of_fixed_size_generates_the_same_padded_too(tmp_path, window):
    config = {**BASE, "sliding_window": window}
    model = heterogeneous(tmp_path, "mistral" if window else "llama", config)
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), TOKENS[:, :5]], dim=1)
    batch = torch.cat([TOKENS, padded])
    mask = torch.ones_like(batch)
    mask[1, :7] = 0
    given = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    # Not compiled: that would take a minute and change nothing that is asked here.
    given["disable_compile"] = True
    fixed = model.generate(batch, cache_implementation="static", **given)
    assert fixed.tolist() == model.generate(batch, **given).tolist()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sliding_window": ...}, r"blocks\[1\] lacks sliding_window"),
        ({"type": ...}, r"blocks\[1\].type is None"),
        ({"type": "mamba"}, r"blocks\[1\].type is 'mamba'"),
        ({"head_size": 64}, r"blocks\[1\] has head_size"),
    ],
)
def test_a_block_that_is_not_whole_is_refused_by_its_place(tmp_path, change, says):
    block = {**attention(6, 2, BASE, "llama"), **change}
    block = {key: value for key, value in block.items() if value is not ...}
    with pytest.raises(Exception, match=says):
        flat_model(tmp_path, BASE, "llama", [mlp(40, BASE), block])


def test_padded_batches_give_what_single_prompts_give(tmp_path):
    model = heterogeneous(tmp_path)
    short = TOKENS[:, :5]
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), short], dim=1)
    batch = torch.cat([TOKENS, padded])
    mask = torch.ones_like(batch)
    mask[1, :7] = 0
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        together = model(batch, attention_mask=mask, position_ids=positions).logits[1, -1]
        alone = model(short).logits[0, -1]
    assert (together - alone).abs().max().item() < 1e-4


def test_every_parameter_gets_a_gradient(tmp_path):
    model = heterogeneous(tmp_path).train()
    model.gradient_checkpointing_enable()
    model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


def test_a_saved_checkpoint_loads_again_with_its_embedding_tied(tmp_path):
    (tmp_path / "first").mkdir()
    model = heterogeneous(tmp_path / "first")
    model.save_pretrained(tmp_path / "second")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "second", trust_remote_code=True).eval()
    assert again.lm_head.weight is again.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, again(TOKENS).logits)
    saved = json.loads((tmp_path / "second" / "config.json").read_text())
    assert saved["blocks"] == model.config.blocks


def test_each_attention_block_has_its_own_head_counts_for_serving(tmp_path):
    config = heterogeneous(tmp_path).config
    assert config.num_hidden_layers == 3
    heads = [(layer.num_attention_heads, layer.num_key_value_heads) for layer in config.per_layer_config]
    assert heads == [(6, 2), (3, 1), (3, 1)]
    base = AutoModel.from_config(config, trust_remote_code=True)
    numbers = [layer.self_attn.layer_idx for layer in base.layers if hasattr(layer, "self_attn")]
    assert numbers == [0, 1, 2]
