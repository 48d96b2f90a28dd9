# Every check prints its figure last and exits 0 only where it holds.
SHELL := /bin/bash
CARGO ?= cargo
CARGO_DENY := 0.20.2

.PHONY: build demo test lint lint-deny check-parity check-solver check-scores check-counts check-estimate check-plan check-shapes check-cpu-speed check-bad-input check-damage check-restart check-dispatch check-simulation check-kill check-chaos check-lost-coordinator check-gang check-kernels check-gpu-ops check-gpu-train check-gpu-forward check-gpu-gang check-gpu-job check-gpu-streamed check-serving check-vllm check-vllm-gpu

build:
	$(CARGO) build --release --locked --bin espalier

demo:
	tests/checks/demo.sh

test:
	tests/checks/test.sh

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings

lint-deny:
	$(CARGO) deny --version >/dev/null 2>&1 || $(CARGO) install cargo-deny --version $(CARGO_DENY) --locked --debug --quiet
	$(CARGO) deny check bans licenses sources

check-parity:
	tests/checks/parity.sh

check-solver:
	tests/checks/solver.sh

check-scores:
	tests/checks/scores.sh "$(DATA)"

check-counts:
	tests/checks/counts.sh

check-estimate:
	tests/checks/estimate.sh

check-plan:
	tests/checks/plan.sh

check-shapes:
	tests/checks/shapes.sh

check-cpu-speed:
	bench/cpu-speed.sh

check-bad-input:
	tests/checks/bad-input.sh

check-damage:
	tests/checks/damage.sh

check-restart:
	tests/checks/restart.sh

check-dispatch:
	bench/dispatch.sh

check-simulation:
	tests/checks/simulation.sh

check-kill:
	tests/checks/kill.sh

check-chaos:
	tests/checks/chaos.sh

check-lost-coordinator:
	tests/checks/lost-coordinator.sh

check-gang:
	tests/checks/gang.sh

check-kernels:
	tests/checks/kernels.sh

check-gpu-ops:
	tests/checks/gpu-ops.sh

check-gpu-train:
	bench/gpu-train.sh

check-gpu-forward:
	bench/gpu-forward.sh

check-gpu-gang:
	bench/gpu-gang.sh

check-gpu-job:
	tests/checks/gpu-job.sh "$(DATA)"

check-gpu-streamed:
	tests/checks/gpu-streamed.sh

check-serving:
	tests/checks/serving.sh

check-vllm:
	tests/checks/vllm.sh

check-vllm-gpu:
	tests/checks/vllm-gpu.sh
