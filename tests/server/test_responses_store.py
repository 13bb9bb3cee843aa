"""Stored responses: conversations, items, eviction, background, cancel, delete."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
from tests.server.fake_engine import FakeEngine
from tests.server.live import Live
from tests.server.test_disconnects import wait_until
from tests.server.test_responses import create, prompt, typed_events

from trunkline.engine.messages import Refused
from trunkline.server.config import ApiOptions, ServerConfig


def test_a_conversation_goes_on(live: Live):
    first = create(live, instructions="be brief").json()
    second = create(live, "more", previous_response_id=first["id"]).json()
    assert second["previous_response_id"] == first["id"]
    assert prompt(live) == "<user>hi\n<assistant>Hello world\n<user>more\n<assistant>"
    create(live, "end", previous_response_id=second["id"], instructions="x")
    assert prompt(live) == (
        "<system>x\n<user>hi\n<assistant>Hello world\n<user>more\n<assistant>Hello world\n"
        "<user>end\n<assistant>"
    )


def test_input_items_by_pages(live: Live):
    first = create(live, [{"role": "user", "content": "a", "id": "msg_mine"}]).json()
    second = create(live, "b", previous_response_id=first["id"]).json()
    path = f"/v1/responses/{second['id']}/input_items"
    page = live.http.get(path, params={"order": "asc"}).json()
    assert [item["role"] for item in page["data"]] == ["user", "assistant", "user"]
    assert page["data"][0] == {
        "type": "message",
        "id": "msg_mine",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "a"}],
    }
    ids = [item["id"] for item in page["data"]]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[0], ids[-1], False)
    newest = live.http.get(path, params={"limit": 1}).json()
    assert ([item["id"] for item in newest["data"]], newest["has_more"]) == (ids[-1:], True)
    rest = live.http.get(path, params={"after": ids[2], "limit": 2}).json()
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == (ids[1::-1], False)
    for params in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "z"}):
        response = live.http.get(path, params=params)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == next(iter(params))


def test_items_are_referred_to(live: Live):
    first = create(live, "a").json()
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    create(live, [{"role": "user", "content": "a"}, reference, {"role": "user", "content": "b"}])
    assert prompt(live) == "<user>a\n<assistant>Hello world\n<user>b\n<assistant>"


def test_deleted_responses_are_gone(live: Live):
    first = create(live).json()
    second = create(live, previous_response_id=first["id"]).json()
    path = f"/v1/responses/{first['id']}"
    answer = live.http.delete(path)
    assert answer.json() == {"id": first["id"], "object": "response", "deleted": True}
    assert live.http.get(path).status_code == 404
    assert live.http.delete(path).status_code == 404
    assert live.http.get(f"{path}/input_items").status_code == 404
    for previous in (first, second):
        response = create(live, previous_response_id=previous["id"])
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "previous_response_id"
        assert first["id"] in response.json()["error"]["message"]
    reference = [{"type": "item_reference", "id": first["output"][0]["id"]}]
    assert create(live, reference).status_code == 400


def test_what_is_not_stored_cannot_be_asked_for(live: Live):
    body = create(live, store=False).json()
    assert body["store"] is False
    assert live.http.get(f"/v1/responses/{body['id']}").status_code == 404


def test_the_store_is_bounded():
    config = ServerConfig(api=ApiOptions(response_store_bytes=20_000))
    with Live(config=config) as live:
        kept = create(live).json()["id"]
        others = []
        for _ in range(20):
            others.append(create(live, "x" * 100).json()["id"])
            assert live.http.get(f"/v1/responses/{kept}").status_code == 200
            assert live.server.responses._num_bytes <= 20_000
        found = [live.http.get(f"/v1/responses/{one}").status_code for one in others]
        assert sorted(found, reverse=True) == found
        assert {200, 404} == set(found)
        for one in (kept, *others):
            live.http.delete(f"/v1/responses/{one}")
        store = live.server.responses
        assert (store._num_bytes, store._items, len(store._entries)) == (0, {}, 0)


def test_a_server_without_a_store():
    with Live(config=ServerConfig(api=ApiOptions(response_store_bytes=0))) as live:
        body = create(live).json()
        assert body["store"] is False
        for field in ("store", "background"):
            response = create(live, **{field: True})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == field
            assert "--response-store-bytes" in response.json()["error"]["message"]


def test_background():
    engine = FakeEngine(hold=True)
    with Live(engine) as live:
        body = create(live, background=True).json()
        assert (body["status"], body["output"], body["background"]) == ("queued", [], True)
        path = f"/v1/responses/{body['id']}"
        assert live.http.get(path).json()["status"] == "queued"
        assert live.server.in_flight == 1
        response = create(live, previous_response_id=body["id"])
        assert "still running" in response.json()["error"]["message"]
        cancelled = live.post(f"{path}/cancel", {}).json()
        assert cancelled["status"] == "cancelled"
        assert live.http.get(path).json() == cancelled
        assert live.post(f"{path}/cancel", {}).json() == cancelled
        assert live.server.in_flight == 0
        engine.hold = False
        again = create(live, background=True).json()
        path = f"/v1/responses/{again['id']}"
        wait_until(lambda: live.http.get(path).json()["status"] == "completed")
        done = live.http.get(path).json()
        assert done["output"][0]["content"][0]["text"] == "Hello world"
        assert done["usage"]["output_tokens"] == 12
        assert not live.server.background


def test_background_that_fails():
    engine = FakeEngine(hold=True)
    with Live(engine) as live:
        body = create(live, background=True).json()
        live.call(lambda: engine.set_status("dead", "killed by SIGKILL"))
        path = f"/v1/responses/{body['id']}"
        wait_until(lambda: live.http.get(path).json()["status"] == "failed")
        error = live.http.get(path).json()["error"]
        assert error["code"] == "server_error"
        assert "SIGKILL" in error["message"]


def test_background_that_is_refused():
    refused = Refused(0, 503, "queue_full", "the queue is full", None)
    with Live(FakeEngine(refuse=refused)) as live:
        response = create(live, background=True)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")
        assert live.server.responses._entries == {}


def test_deleting_aborts_what_runs():
    with Live(FakeEngine(delay_s=0.02)) as live:
        body = create(live, background=True, max_output_tokens=400, ignore_eos=True).json()
        live.http.delete(f"/v1/responses/{body['id']}")
        wait_until(lambda: not live.engine.running and live.server.in_flight == 0)
        assert live.engine.aborted == [body["id"]]
        assert live.http.get(f"/v1/responses/{body['id']}").status_code == 404


def test_a_stream_is_cancelled_from_elsewhere():
    with Live(FakeEngine(delay_s=0.02)) as live:
        fields = {"input": "x", "stream": True, "max_output_tokens": 400, "ignore_eos": True}
        with live.http.stream("POST", "/v1/responses", json=fields) as response:
            chunks = response.iter_text()
            first = next(chunks)
            response_id = json.loads(first.split("\n")[1].removeprefix("data: "))["response"]["id"]
            other = httpx.post(f"{live.url}/v1/responses/{response_id}/cancel", json={})
            assert other.json()["status"] == "cancelled"
            rest = "".join(chunks)
        last = json.loads(rest.split("\n\n")[-2].split("\n")[1].removeprefix("data: "))
        assert last["type"] == "response.incomplete"
        assert last["response"] == other.json()


def test_a_client_that_leaves_does_not_leave_it_running():
    with Live(FakeEngine(delay_s=0.02)) as live:
        fields = {"input": "x", "stream": True, "max_output_tokens": 400, "ignore_eos": True}
        with live.http.stream("POST", "/v1/responses", json=fields) as response:
            first = next(response.iter_text())
            response_id = json.loads(first.split("\n")[1].removeprefix("data: "))["response"]["id"]
        path = f"/v1/responses/{response_id}"
        wait_until(lambda: live.http.get(path).json()["status"] == "cancelled")
        assert live.engine.aborted == [response_id]
        left = live.http.get(path).json()
        assert left["usage"]["input_tokens"] > 0


def test_what_has_ended_cannot_be_cancelled(live: Live):
    body = create(live).json()
    response = live.post(f"/v1/responses/{body['id']}/cancel", {})
    assert response.status_code == 400
    assert live.post("/v1/responses/resp_none/cancel", {}).status_code == 404


def test_unknown_responses(live: Live):
    for path in ("resp_none", "resp_none/input_items", "%2e%2e"):
        assert live.http.get(f"/v1/responses/{path}").status_code == 404
    body = create(live).json()
    response = live.http.get(f"/v1/responses/{body['id']}", params={"stream": "true"})
    assert response.status_code == 400


def test_the_store_may_be_used_by_many_at_once(live: Live):
    async def work() -> list[int]:
        async with httpx.AsyncClient(base_url=live.url, timeout=20) as http:

            async def conversation(number: int) -> int:
                previous = None
                for turn in range(4):
                    body = {"input": f"{number} {turn}", "previous_response_id": previous}
                    answer = await http.post("/v1/responses", json=body)
                    previous = answer.json()["id"]
                answer = await http.get(f"/v1/responses/{previous}/input_items?order=asc")
                items = [item for item in answer.json()["data"] if item["role"] == "user"]
                texts = [item["content"][0]["text"] for item in items]
                assert texts == [f"{number} {turn}" for turn in range(4)]
                return len(answer.json()["data"])

            return await asyncio.gather(*(conversation(number) for number in range(10)))

    assert asyncio.run(work()) == [7] * 10


def test_a_stream_in_the_background_is_taken_up_again():
    with Live(FakeEngine(delay_s=0.02)) as live:
        fields = {"input": "x", "background": True, "stream": True, "max_output_tokens": 30}
        body = {**fields, "ignore_eos": True, "banana": 1}
        with live.http.stream("POST", "/v1/responses", json=body) as response:
            assert response.headers["x-ignored-fields"] == "banana"
            first = next(response.iter_text()).split("\n\n")[0]
            response_id = json.loads(first.split("\n")[1].removeprefix("data: "))["response"]["id"]
        assert live.engine.aborted == []
        path = f"/v1/responses/{response_id}"
        everything = live.http.get(path, params={"stream": "true"})
        events = typed_events(everything)
        assert events[-1]["response"] == live.http.get(path).json()
        assert events[-1]["response"]["usage"]["output_tokens"] == 30
        assert events[0]["response"]["status"] in ("queued", "in_progress")
        assert events[1]["response"]["status"] == "in_progress"
        after = live.http.get(path, params={"stream": "true", "starting_after": "7"}).text
        assert after == "".join(f"{one}\n\n" for one in everything.text.split("\n\n")[8:-1])
        beyond = {"stream": "true", "starting_after": "999"}
        assert live.http.get(path, params=beyond).text == ""
        for params in (
            {"stream": "true", "starting_after": "x"},
            {"stream": "yes"},
            {"starting_after": "3"},
            {"stream": "false", "starting_after": "3"},
        ):
            assert live.http.get(path, params=params).status_code == 400
        assert live.http.get(path, params={"stream": "false", "limit": "x"}).status_code == 200
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="None") as client:
            stream = client.responses.retrieve(response_id, stream=True, starting_after=3)
            numbers = [event.sequence_number for event in stream]
            assert numbers == list(range(4, len(events)))


def test_a_stream_in_the_background_that_is_cancelled_or_fails():
    with Live(FakeEngine(delay_s=0.02)) as live:
        fields = {"background": True, "stream": True, "max_output_tokens": 400}
        for end in ("cancel", "kill"):
            body = {"input": "x", **fields, "ignore_eos": True}
            with live.http.stream("POST", "/v1/responses", json=body) as response:
                chunks = response.iter_text()
                first = next(chunks).split("\n")[1].removeprefix("data: ")
                path = f"/v1/responses/{json.loads(first)['response']['id']}"
                if end == "cancel":
                    httpx.post(f"{live.url}{path}/cancel", json={})
                else:
                    live.call(lambda: live.engine.set_status("dead", "killed"))
                last = "".join(chunks).split("\n\n")[-2]
            assert ("response.failed" if end == "kill" else "response.incomplete") in last
            status = live.http.get(path).json()["status"]
            assert status == ("failed" if end == "kill" else "cancelled")
            wait_until(lambda: not live.server.background)
