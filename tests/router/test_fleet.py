"""The fleet simulator as Python sees it, its benchmark, and the fit of step times."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trunkline._core import shared_prefix_trace, simulate_fleet
from trunkline.engine.env_vars import STEP_TIMES, EnvironmentVariableError, step_times_file
from trunkline.engine.step_times import TimedExecutor, work_of
from trunkline.kernels import Finished
from trunkline.plan import Plan
from trunkline.server.router.config import RouterConfig

BENCH = Path(__file__).parents[2] / "bench"
WORKLOAD = {"requests": 400, "rate": 50.0, "groups": 40, "output_tokens": 64}


def simulate(**config: object) -> dict[str, object]:
    trace = shared_prefix_trace(json.dumps(WORKLOAD).encode())
    settings = {"workers": 4, "block_tokens": 64, **config}
    figures: dict[str, object] = json.loads(simulate_fleet(json.dumps(settings).encode(), trace))
    return figures


def test_a_fleet_serves_a_trace() -> None:
    figures = simulate()
    assert figures["completed"] == figures["requests"] == 400
    assert 0 < float(str(figures["hit_rate"])) <= float(str(figures["ideal_hit_rate"])) + 0.02
    assert figures == simulate()


def test_the_command_chooses_as_the_core_does_by_default() -> None:
    choice = RouterConfig().as_core([])["choice"]
    assert isinstance(choice, dict)
    given = {name: value for name, value in choice.items() if name not in ("policy", "seed")}
    assert simulate(router=given) == simulate()
    assert simulate(router={**given, "decode_weight": 8.0}) != simulate(), "it would be noticed"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"workers": 0}, "workers must be 1 to 16384"),
        ({"polcy": "random"}, "unknown field `polcy`"),
        ({"router": {"load_bound": 0.5}}, "load_bound is 0.5"),
        ({"engine": {"max_batch_tokens": 1}}, "max_batch_tokens"),
    ],
)
def test_unusable_settings_are_named(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(**config)


def test_an_unusable_trace_names_its_line() -> None:
    with pytest.raises(ValueError, match="line 2 of the trace"):
        simulate_fleet(b"{}", '{"timestamp": 0, "input_length": 1, "output_length": 1}\n{}')


def test_the_benchmark_compares_policies(tmp_path: Path) -> None:
    report = tmp_path / "fleet.json"
    arguments = ["--policies", "cache_aware", "round_robin", "vllm_router", "--loads", "0.3"]
    arguments += ["--workers", "3", "--fail", "0.34", "--json", str(report)]
    trace = tmp_path / "made.jsonl"
    trace.write_text(shared_prefix_trace(json.dumps(WORKLOAD).encode()))
    arguments += ["--trace", str(trace), "--block-tokens", "64", "--router", '{"head_blocks": 3}']
    command = [sys.executable, str(BENCH / "fleet.py"), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "cache_aware" in done.stdout
    sweep = json.loads(report.read_text())["sweep"]
    assert [result["policy"] for result in sweep] == ["cache_aware", "round_robin", "vllm_router"]
    assert sweep[0]["offered_load"] == pytest.approx(0.3, rel=0.01)


class InstantRunner:
    """A runner whose result is empty."""

    def forward(self, plan: Plan) -> None:
        pass

    def awaits_earlier(self, plan: Plan) -> bool:
        return False

    def sample(self, plan: Plan) -> Finished:
        return Finished(np.zeros(1, dtype=np.uint8))


def test_steps_are_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.__new__(Plan)
    plan.row_query_len = np.array([1, 1, 10], dtype=np.int32)
    plan.row_computed_len = np.array([5, 9, 100], dtype=np.int32)
    work = {"prompt_tokens": 10, "decode_rows": 2, "decode_context": 16, "prompt_pairs": 1055}
    assert work_of(plan) == work
    path = tmp_path / "steps.jsonl"
    monkeypatch.setenv(STEP_TIMES, str(path))
    assert step_times_file() == path
    timed = TimedExecutor(InstantRunner(), path)
    for _ in range(2):
        timed.forward(plan)
        timed.sample(plan).wait()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2
    assert lines[0].pop("seconds") > 0
    assert lines[0] == work
    monkeypatch.setenv(STEP_TIMES, "steps.jsonl")
    with pytest.raises(EnvironmentVariableError, match="must be an absolute path"):
        step_times_file()


def test_the_fit_finds_the_coefficients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import fit_steps

    rng = np.random.default_rng(1)
    rows = np.column_stack([np.ones(200), rng.uniform(0, 1000, (200, 4))])
    truth = np.array([6e-3, 4e-5, 0.0, 3e-8, 1e-9])
    assert fit_steps.fit(rows, rows @ truth) == pytest.approx(truth, rel=1e-6, abs=1e-12)
