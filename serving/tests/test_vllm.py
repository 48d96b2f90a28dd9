"""Exports in unmodified vLLM, through the plugin alone: no code of the checkpoint's is trusted.

Every odd shape gives the greedy tokens and the log-probabilities that transformers gives with the modelling file, and
holds keys and values for its own KV heads only. Skipped where vLLM or the plugin is not installed.
"""

import json
import shutil
from importlib.metadata import entry_points

import engine  # Sets vLLM's environment, so it comes before vLLM.
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here")
if not [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "espalier"]:
    pytest.skip("the plugin is not installed here: pip install serving/", allow_module_level=True)

import odd_shapes  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

NEW_TOKENS = 24


def prompts():
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 7, 33, 70]
    return [torch.randint(3, 301, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("shape", odd_shapes.SHAPES)
def test_vllm_gives_what_transformers_gives(tmp_path, shape):
    changes, blocks = odd_shapes.SHAPES[shape]
    model = odd_shapes.write(tmp_path / "checkpoint", changes, blocks)
    expected = odd_shapes.greedy(model, prompts(), NEW_TOKENS)
    with engine.served(tmp_path / "checkpoint") as served:
        [name] = served.apply_model(lambda inner: type(inner).__module__)
        tokens, logprobs = engine.answers(served, prompts(), NEW_TOKENS)
        held = engine.cache_bytes_per_token(served)
    assert name == "espalier_vllm.model"
    assert tokens == expected
    for prompt, found in zip(prompts(), logprobs):
        wanted = odd_shapes.log_probabilities(model, prompt)
        assert found == pytest.approx(wanted, abs=2e-4)
    # Keys and values, f32, of the block's own KV heads; nothing for an MLP or an absent block.
    assert held == {
        f"model.layers.{index}.self_attn.attn": 2 * block["num_key_value_heads"] * odd_shapes.HEAD * 4
        for index, block in enumerate(blocks)
        if block["type"] == "attention"
    }


def test_a_compiled_model_gives_what_an_eager_one_gives(tmp_path, monkeypatch):
    """One directory after the other under one name: what was compiled is told apart by the blocks alone."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    directory = tmp_path / "checkpoint"
    for seed, shape in enumerate(["every block another size", "first block an MLP"]):
        changes, blocks = odd_shapes.SHAPES[shape]
        shutil.rmtree(directory, ignore_errors=True)
        model = odd_shapes.write(directory, changes, blocks, seed=seed)
        with engine.served(directory, enforce_eager=False) as served:
            tokens, _ = engine.answers(served, prompts(), NEW_TOKENS)
        assert tokens == odd_shapes.greedy(model, prompts(), NEW_TOKENS)


def plain_qwen2(directory, heads):
    """Qwen2 as its own family, whose heads have a size that its config names."""
    sizes = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 301}
    attention = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": odd_shapes.HEAD}
    config = Qwen2Config(**sizes, **attention, max_position_embeddings=256, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.15 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(directory)
    return model


def test_a_plain_qwen2_is_served_while_its_heads_fill_its_width_and_no_longer(tmp_path):
    """The export writes what vLLM cannot load so in the flat form, which names each block's head size."""
    model = plain_qwen2(tmp_path / "whole", 3)
    with engine.served(tmp_path / "whole") as served:
        tokens, _ = engine.answers(served, prompts(), NEW_TOKENS)
    assert tokens == odd_shapes.greedy(model, prompts(), NEW_TOKENS)
    plain_qwen2(tmp_path / "cut", 1)
    with pytest.raises(RuntimeError, match="exceeds dimension size"), engine.served(tmp_path / "cut"):
        pass


def test_bf16_weights_are_served_in_bf16(tmp_path):
    changes, blocks = odd_shapes.SHAPES["every block another size"]
    model = odd_shapes.write(tmp_path / "checkpoint", changes, blocks, dtype=torch.bfloat16)
    with engine.served(tmp_path / "checkpoint", dtype="auto") as served:
        _, logprobs = engine.answers(served, prompts(), 1)
        held = engine.cache_bytes_per_token(served)
    model = model.float()
    for prompt, found in zip(prompts(), logprobs):
        wanted = odd_shapes.log_probabilities(model, prompt)
        # Of log-probabilities around -6, by tokens' median: bf16 of two engines rounds differently.
        errors = sorted(abs(a - b) for a, b in zip(found, wanted))
        assert not errors or errors[len(errors) // 2] < 0.1, errors
    assert sorted(held.values()) == [2 * kv_heads * odd_shapes.HEAD * 2 for kv_heads in (1, 2, 3)]


def test_keys_and_values_fill_the_space_that_is_given_and_no_more(tmp_path):
    """As many tokens as the blocks' own bytes allow: twice as many once half of the KV heads are gone."""
    space = 8 << 20
    capacities = {}
    for name, kv_heads in (("whole", 4), ("half", 2), ("mixed", None)):
        sizes = [4, 2] if kv_heads is None else [kv_heads] * 2
        blocks = [odd_shapes.attention(4, sizes[0]), odd_shapes.mlp(64), odd_shapes.attention(4, sizes[1])]
        odd_shapes.write(tmp_path / name, {}, blocks)
        with engine.served(tmp_path / name, kv_cache_memory_bytes=space) as served:
            cache = served.llm_engine.vllm_config.cache_config
            capacities[name] = cache.num_gpu_blocks * cache.block_size
        needed = capacities[name] * sum(2 * size * odd_shapes.HEAD * 4 for size in sizes)
        assert space * 0.95 < needed <= space, name
    assert capacities["half"] == 2 * capacities["whole"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("extra", "layers.9.mlp.up_proj.weight"),
        ("part", "lacks model.layers.2.self_attn.k_proj.weight"),
        ("norm", "lacks model.layers.1.post_attention_layernorm"),
        ("linear", "lacks model.layers.3.mlp.down_proj"),
        ("large", r"layers.3.mlp.down_proj.weight is \(96, 80\), expected \(96, 64\)"),
        ("small", r"layers.2.self_attn.q_proj.weight is \(64, 96\), expected \(96, 96\)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_blocks_is_refused_by_name(tmp_path, damage, says):
    changes, blocks = odd_shapes.SHAPES["every block another size"]
    odd_shapes.write(tmp_path / "checkpoint", changes, blocks)
    file = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(file)
    if damage == "extra":
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(8, 8)
    elif damage == "part":
        del tensors["model.layers.2.self_attn.k_proj.weight"]
    elif damage == "norm":
        del tensors["model.layers.1.post_attention_layernorm.weight"]
    elif damage == "linear":
        del tensors["model.layers.3.mlp.down_proj.weight"]
    elif damage == "large":
        # One that vLLM's own loaders would cut.
        tensors["model.layers.3.mlp.down_proj.weight"] = torch.zeros(96, 80)
    else:
        tensors["model.layers.2.self_attn.q_proj.weight"] = torch.zeros(64, 96)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(Exception, match=says), engine.served(tmp_path / "checkpoint"):
        pass


def test_a_config_without_attention_is_refused(tmp_path):
    changes, blocks = odd_shapes.SHAPES["plain layers"]
    odd_shapes.write(tmp_path / "checkpoint", changes, blocks)
    file = tmp_path / "checkpoint" / "config.json"
    config = json.loads(file.read_text())
    config["blocks"] = [odd_shapes.mlp(64)]
    file.write_text(json.dumps(config))
    with pytest.raises(Exception, match="expected at least one"), engine.served(tmp_path / "checkpoint"):
        pass
