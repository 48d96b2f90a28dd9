#!/usr/bin/env bash
# make check-serving: exports of every odd shape in unmodified vLLM 0.32 on the CPU, through the plugin alone: greedy
# text and log-probabilities equal to transformers', keys and values of each block's own size, damaged checkpoints
# refused by name; and the helper, which measures there for a worker. Needs Python 3.10 or later with venv, the network (PyPI), 8 GB of disk and 4 GB of memory.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=$(tests/checks/vllm-venv.sh)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Nothing is fetched by name, and the modules of checkpoints that carry code stay out of the user's cache.
export HF_HOME=$work/huggingface VLLM_CACHE_ROOT=$work/vllm TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=1

# A check that skips is none: without vLLM or the plugin it fails here. One test asks for the clock of a GPU.
"$python" -c 'import vllm, espalier_vllm'
"$python" -m pytest --quiet -p no:cacheprovider -W ignore \
    -k "not test_a_gpu_says_its_own_time_and_the_graph_that_ran" \
    serving/tests/test_vllm.py serving/tests/test_vllm_helper.py serving/tests/test_helper.py | tee "$work/log"
! grep -q skipped "$work/log"
