"""While draining, what runs goes on and is counted to its last byte; what is new is refused; readiness is gone."""

import asyncio
from typing import Any

import httpx
from twinpool.router.app import Door, create_app
from twinpool.router.drain import Drain
from twinpool.router.openai.tokenizer import ChatTokenizer

BODY = {"prompt": "hi", "max_tokens": 4}


def test_draining(backend: Any, tokenizer: ChatTokenizer, say: Any, new_gate: Any) -> None:
    async def main() -> None:
        drain = Drain()
        gate = new_gate()
        events = say("hello world")
        backend.script = lambda request: [events[0], gate, *events[1:]]
        app = create_app(backend, tokenizer, "tiny", door=Door(drain=drain))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
            assert await drain.is_idle_within(0)
            running = asyncio.create_task(client.post("/v1/completions", json=BODY | {"stream": True}))
            await asyncio.to_thread(backend.waiting.wait, 10)
            assert drain.num_running == 1
            drain.begin()
            for path in ("/v1/completions", "/v1/chat/completions", "/no/such/path"):
                refused = await client.post(path, json=BODY)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
                assert int(refused.headers["retry-after"]) >= 1
            for path, status in {"/health": 503, "/health/ready": 503, "/health/live": 200, "/v1/models": 200}.items():
                answer = await client.get(path)
                assert answer.status_code == status, path
                if status == 503:
                    assert answer.json()["error"]["code"] == "draining"
            assert not await drain.is_idle_within(0)
            gate.open()
            assert (await running).text.endswith("data: [DONE]\n\n")
            assert await drain.is_idle_within(10)
            assert drain.num_running == 0

    asyncio.run(main())
