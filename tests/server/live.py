"""A server on a free port, in a thread of the test process, over a fake engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import uvloop
from starlette.applications import Starlette
from tests.server.fake_engine import CONTEXT, HIDDEN, VOCAB, ByteTokenizer, FakeEngine

from trunkline.engine.chat_template import ChatTemplate, TemplateSource
from trunkline.engine.client import Client
from trunkline.engine.fleet import Fleet, balance_method
from trunkline.server.app import create_app
from trunkline.server.config import ServerConfig
from trunkline.server.connections import listen
from trunkline.server.serve import bind
from trunkline.server.state import ServedModel, Server
from trunkline.server.tls import server_context

MODEL = "fake/model"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'refuse me' %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def fake_app(
    client: Client | Fleet,
    config: ServerConfig,
    template: str | None = TEMPLATE,
    model_sampling: dict[str, Any] | None = None,
) -> Starlette:
    """An app that serves the model of `FakeEngine`."""
    source = None if template is None else TemplateSource({"default": template}, "test")
    model = ServedModel(
        name=MODEL,
        path=MODEL,
        tokenizer_path=MODEL,
        model_type="llama",
        architecture="LlamaForCausalLM",
        context_length=CONTEXT,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
    )
    chat_template = ChatTemplate(source, {})
    return create_app(client, ByteTokenizer(), chat_template, config, model, model_sampling or {})


class Live:
    """A running server. `engine` may be changed between requests."""

    def __init__(
        self,
        engine: FakeEngine | None = None,
        config: ServerConfig | None = None,
        model_sampling: dict[str, Any] | None = None,
        template: str | None = TEMPLATE,
        more_engines: Sequence[FakeEngine] = (),
    ) -> None:
        self.engine = engine or FakeEngine()
        self.engines = [self.engine, *more_engines]
        config = config or ServerConfig()
        self._config = replace(config, http=replace(config.http, port=0))
        self._sampling = model_sampling or {}
        self._template = template
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Live:
        self._thread.start()
        assert self._started.wait(10)
        self.http = httpx.Client(base_url=self.url, timeout=20)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.loop.call_soon_threadsafe(self.stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the server's loop."""

        async def wrapped() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(wrapped(), self.loop).result(10)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def generate(self, **body: Any) -> httpx.Response:
        return self.post("/generate", body)

    def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.post("/v1/chat/completions", body)

    def completion(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.stop = asyncio.Event()
        client = (
            Client(self.engine)
            if len(self.engines) == 1
            else Fleet(self.engines, balance_method(self._config.engine))
        )
        await client.start()
        await client.ready()
        app = fake_app(client, self._config, self._template, self._sampling)
        self.server: Server = app.state.server
        listener = bind(self._config.http)
        self.port = listener.getsockname()[1]
        await self.server.batches.start()
        http = self._config.http
        serving = asyncio.create_task(
            listen(app, listener, http, self.stop, tls=server_context(http))
        )
        self.loop.call_soon(self._started.set)
        await serving
        await self.server.batches.close()
        await client.close()
