#!/usr/bin/env python3
"""Makes the tiny parent in this directory: a Llama-shaped model trained on ../data/train.jsonl.xz.

    pip install torch transformers tokenizers safetensors
    python make_tiny.py [OUTPUT_DIRECTORY]

One CPU thread is enough; it takes about five minutes. The model must really have learnt, so that pruning
hurts and recovery helps: the script prints the held-out loss beside the unigram entropy, and fails
unless the loss is well below it.
"""

import json
import lzma
import math
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "data"
SEPARATOR, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 1024
SEQUENCE = 128
BATCH = 16
STEPS = 1600
WARMUP = 60
PEAK_RATE = 4e-3
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def documents(name: str) -> list[str]:
    with lzma.open(DATA / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[SEPARATOR, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    return tokenizer


def pack(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """All documents end to end, the separator (token 0) between them, cut into sequences."""
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        stream.extend(encoding.ids)
        stream.append(0)
    whole = len(stream) // SEQUENCE * SEQUENCE
    return torch.tensor(stream[:whole]).view(-1, SEQUENCE)


def unigram_entropy(train: torch.Tensor, held_out: torch.Tensor) -> float:
    """Nats a token when each is predicted by its frequency in the training text alone."""
    counts = Counter(train.flatten().tolist())
    total = train.numel() + VOCABULARY
    losses = [-math.log((counts[token] + 1) / total) for token in held_out.flatten().tolist()]
    return sum(losses) / len(losses)


def configuration() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


def rate(step: int) -> float:
    if step < WARMUP:
        return (step + 1) / WARMUP
    done = (step - WARMUP) / (STEPS - WARMUP)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def train_model(sequences: torch.Tensor) -> LlamaForCausalLM:
    model = LlamaForCausalLM(configuration())
    optimiser = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
    order = torch.empty(0, dtype=torch.long)
    started = time.monotonic()
    for step in range(STEPS):
        if len(order) < BATCH:
            order = torch.randperm(len(sequences))
        rows, order = order[:BATCH], order[BATCH:]
        batch = sequences[rows]
        loss = model(input_ids=batch, labels=batch).loss
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step} loss {loss.item():.4f} after {time.monotonic() - started:.0f} s", flush=True)
    return model


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, sequences: torch.Tensor) -> float:
    losses = [model(input_ids=batch, labels=batch).loss.item() for batch in sequences.split(32)]
    return sum(losses) / len(losses)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save(output: Path, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    output.mkdir(parents=True, exist_ok=True)
    # The head is the embedding, so it is stored once.
    tensors = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    config = configuration()
    # Written out by hand: the keys that every version of transformers reads.
    write_json(
        output / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "torch_dtype": "bfloat16",
        },
    )
    write_json(output / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    write_json(
        output / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": START,
            "eos_token": END,
            "pad_token": END,
            "unk_token": SEPARATOR,
            "model_max_length": config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    tokenizer.save(str(output / "tokenizer.json"))


def main() -> int:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    train_texts = documents("train.jsonl.xz")
    tokenizer = train_tokenizer(train_texts)
    train = pack(tokenizer, train_texts)
    held_out = pack(tokenizer, documents("validation.jsonl.xz")[:60])
    print(f"{train.numel()} training tokens, {held_out.numel()} held out", flush=True)
    model = train_model(train).eval().to(torch.bfloat16)
    save(output, model, tokenizer)
    loss, unigram = held_out_loss(model.float(), held_out), unigram_entropy(train, held_out)
    print(f"held-out loss {loss:.4f} nats a token, unigram entropy {unigram:.4f}")
    return 0 if loss < 0.7 * unigram else 1


if __name__ == "__main__":
    sys.exit(main())
