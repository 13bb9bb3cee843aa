"""The Rust router as Python sees it: what data parallelism inside one server uses."""

import array
import json

import pytest

from trunkline._core import Router, RouterError


def tokens(*ids: int) -> bytes:
    return array.array("I", ids).tobytes()


@pytest.fixture
def router() -> Router:
    router = Router(b"{}", block_tokens=4)
    for name in ("0", "1"):
        router.add_worker(name, 1000)
    return router


def test_a_prefix_returns_to_its_worker(router: Router) -> None:
    worker, ticket, cached = router.select(tokens(*range(40)), 0.0)
    assert cached == 0
    router.started(ticket)
    router.finished(ticket, "completed", 1.0)
    again, ticket, cached = router.select(tokens(*range(40), 7, 7), 2.0)
    assert (again, cached) == (worker, 40)
    assert router.loads()[worker]["prefill_tokens"] == 2
    other, _, cached = router.select(tokens(*range(40)), 2.0, namespace=b"salt", only=[1 - worker])
    assert (other, cached) == (1 - worker, 0)
    router.finished(ticket, "cancelled", 3.0)
    router.forget_cache(worker)
    assert router.select(tokens(*range(40)), 4.0, only=[worker])[2] == 0


def test_who_is_out_gets_nothing(router: Router) -> None:
    router.set_ready(0, False)
    assert {router.select(tokens(n), 0.0)[0] for n in range(20)} == {1}
    with pytest.raises(RouterError, match="no worker is available"):
        router.select(tokens(1), 0.0, exclude=[1])
    router.remove_worker(1)
    with pytest.raises(RouterError, match="no worker 1"):
        router.remove_worker(1)
    assert router.add_worker("2", 100) == 2
    assert router.select(tokens(1), 0.0)[0] == 2


def test_a_report_counts_as_load(router: Router) -> None:
    home, ticket, _ = router.select(tokens(*range(40)), 0.0)
    router.finished(ticket, "completed", 0.0)
    router.report(home, 0.0, running=1, waiting=3, waiting_uncached_tokens=90, kv_used=0.5)
    assert router.select(tokens(*range(40)), 0.0)[0] == 1 - home


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"policy": "best"}, "unknown variant `best`"),
        ({"polcy": "random"}, "unknown field `polcy`"),
        ({"load_bound": 0.5}, "load_bound is 0.5; it must be at least 1"),
    ],
)
def test_unusable_settings_are_named(config: dict[str, object], message: str) -> None:
    with pytest.raises(RouterError, match=message):
        Router(json.dumps(config).encode())


def test_another_outcome_is_refused(router: Router) -> None:
    with pytest.raises(RouterError, match=r"fine.* is no outcome"):
        router.finished(0, "fine", 0.0)
