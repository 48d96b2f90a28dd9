"""A process that measures models in vLLM for a worker: `python -m espalier_vllm.helper`.

What passes is written down in docs/dev/vllm-protocol.md. `requests` says what is well-formed, `channel` carries lines,
`session` keeps the engines and answers, `measure` drives one engine by steps, `memory` and `clock` look at the process.
Of vLLM only `engine` knows, so that all of the rest runs and is tested without it.
"""

PROTOCOL = 1
