"""Environments of the package verifiers, `verifiers:TASKSET`: its own episodes, our policy.

The package plays an episode as it always does, with its hooks, stops and rewards. The policy sits
in its one seat as a plain chat: a harness in this process that sends the conversation to an
endpoint of ours, which hands it to the trainer and answers with what the trainer has sampled.
"""

import asyncio
import importlib
import threading
import time
import weakref
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from proxpo.errors import ProxpoError, imported
from proxpo.train.tasks._files import split_by_hash
from proxpo.train.tasks._identity import question
from proxpo.train.tasks._session import EARNED, Memory, Move, Script, Session, Show, sessions
from proxpo.train.tasks._types import Problem, Task

T = TypeVar("T")
POLICY = "policy"  # the model's name in the package's records
SESSION = "X-Session-ID"  # header that carries the id of a trace
MOST_BYTES = 2**26  # of a conversation


@dataclass(frozen=True)
class Call:
    """A request for the policy's next response: the conversation, and the place of the answer."""

    messages: list[dict[str, Any]]
    answer: asyncio.Future[str]


class Host:
    """An environment of verifiers on an event loop of its own, and the endpoint it asks."""

    def __init__(self, package: Any, env: Any, seat: str) -> None:
        self._package, self._env, self._seat = package, env, seat
        self._calls: dict[str, asyncio.Queue[Call]] = {}  # by the id of a trace
        self._stack = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._context = self.run(self._open())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def later(self, function: Any, *arguments: Any) -> None:
        """Calls the function on the loop."""
        self._loop.call_soon_threadsafe(function, *arguments)

    async def begin(self, task: Any) -> "Episode":
        """Starts an episode of a task of the package."""
        calls: asyncio.Queue[Call] = asyncio.Queue()
        traces: list[str] = []

        def register(trace: Any) -> None:
            traces.append(trace.id)
            self._calls[trace.id] = calls

        async def play() -> Any:
            try:
                return await self._env.run_episode(task, self._context, on_trace=register)
            finally:
                for number in traces:
                    del self._calls[number]

        return Episode(calls, asyncio.ensure_future(play()))

    async def _open(self) -> Any:
        """Starts the endpoint and the environment; where and as whom episodes find the policy."""
        from aiohttp import ClientSession, ClientTimeout, web

        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_post("/v1/chat/completions", self._respond)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        http = await self._stack.enter_async_context(
            ClientSession(timeout=ClientTimeout(total=None))
        )
        self._seat_policy(_chat_harness(self._package, http))
        await self._stack.enter_async_context(self._env.serving())
        address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        client = self._package.EvalClientConfig(base_url=address, api_key_var="PROXPO_NO_KEY")
        return self._package.ModelContext(model=POLICY, client=client)

    def _seat_policy(self, harness: Any) -> None:
        """Puts the harness into the seat of every episode, after the environment's own set-up."""
        own = self._env.setup

        async def setup(agents: Any) -> None:
            await own(agents)
            agent = getattr(agents, self._seat)
            agent.harness = harness(agent.harness.config)

        self._env.setup = setup

    async def _respond(self, request: Any) -> Any:
        """Answers one request of a conversation, in the form of OpenAI's chat completions."""
        from aiohttp import web

        body = await request.json()
        call = Call(body["messages"], self._loop.create_future())
        self._calls[request.headers[SESSION]].put_nowait(call)
        message = {"role": "assistant", "content": await call.answer}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {
                "id": POLICY,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": POLICY,
                "choices": [choice],
            }
        )


@dataclass(frozen=True)
class Episode:
    """An episode under way: the calls it makes, and its result at the end."""

    calls: asyncio.Queue[Call]
    result: asyncio.Future[Any]

    async def next_call(self) -> Call | None:
        """The next request for a response; None at the end of the episode."""
        waiting = asyncio.ensure_future(self.calls.get())
        await asyncio.wait({waiting, self.result}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        return None


class Conversation:
    """A game: messages of the environment are its observations, responses its actions.

    The reward comes with the last response.
    """

    rules = system = ""

    def __init__(self, host: Host, task: Any, name: str) -> None:
        self._host, self._task, self._name = host, task, name
        self._drop: Any = lambda: None
        self.won = False

    def start(self) -> str:
        self._drop()
        self._episode = self._host.run(self._host.begin(self._task))
        # An episode that is left before its end, or has lost its player, is given up.
        self._drop = weakref.finalize(self, self._host.later, self._episode.result.cancel)
        self.won, self._read = False, 0
        opening = self._advance()
        if opening is None:
            self._reward()
            raise ProxpoError(f"task {self._name}: an episode ended before the policy's first turn")
        self.system = "\n".join(text for role, text in opening if role == "system")
        shown = [(role, text) for role, text in opening if role != "system"]
        if any(role != "user" for role, _ in shown):
            raise ProxpoError(
                f"task {self._name}: its first prompt holds turns of "
                f"{', '.join(sorted({role for role, _ in shown} - {'user'}))}; messages of the "
                "user and a system prompt are taken"
            )
        return "\n".join(text for _, text in shown)

    def move(self, action: str) -> Move:
        self._host.later(self._call.answer.set_result, action)
        told = self._advance()
        if told is None:
            reward = self._reward()
            self.won = reward >= 1
            return Move("", reward=reward, done=True)
        return Move("\n".join(text for role, text in told if role != "assistant"))

    def _advance(self) -> list[tuple[str, str]] | None:
        """Roles and texts of the messages since the last call; None at the end."""
        call = self._host.run(self._episode.next_call())
        if call is None:
            return None
        self._call, new = call, call.messages[self._read :]
        self._read = len(call.messages)
        return [(message["role"], self._text(message.get("content"))) for message in new]

    def _text(self, content: Any) -> str:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        if any(part.get("type") != "text" for part in parts):
            raise ProxpoError(f"task {self._name} shows images; the policy reads text alone")
        return "\n".join(part["text"] for part in parts)

    def _reward(self) -> float:
        """Sum of the weighted rewards of the finished episode; one that failed is refused."""
        episode = self._episode.result.result()
        errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
        if not episode.ok:
            raise _refusal(self._name, errors[-1].message if errors else "an episode failed")
        return float(sum(trace.reward for trace in episode.traces))


def verifiers(
    *,
    name: str,
    env: str = "",
    config: dict | None = None,
    size: int = 1000,
    held_out: float = 0.1,
    attempts: int = 1,
    memory: Memory = "reflection",
    show: Show = "course",
    fold: bool = False,
    max_turns: int = 20,
    chat: bool = True,
    template: dict | None = None,
) -> Task:
    """The taskset `name`, an importable module; `config` goes to it, `env` pairs it with another
    environment.

    size: tasks that are read, from the first; held_out: share of them, by their hash, that is not
    trained on. max_turns: after so many responses the package ends and scores an episode. Solved
    from a reward of 1 on. attempts, memory, show, fold, chat as in textarena.
    """
    full = f"verifiers:{name}"
    if not 0 < held_out < 1 or size < 2:
        raise ProxpoError(
            f"task {full}: held_out is a share between 0 and 1 and size at least 2, got "
            f"{held_out} and {size}"
        )
    script = Script(
        attempts=attempts,
        memory=memory,
        show=show,
        fold=fold,
        max_turns=max_turns,
        chat=chat,
        whole=False,
    )
    package = imported(
        "verifiers.v1",
        "task verifiers needs the package of that name, 0.4 or later: pip install "
        "'proxpo[verifiers]'",
    )
    try:
        made, seat = _environment(package, name, env, config or {}, max_turns)
        tasks = list(made.taskset.take(size))
    except Exception as error:  # of any kind: the module is not ours
        raise _refusal(full, error) from None
    host = Host(package, made, seat)

    def begin(number: int) -> Conversation:
        return Conversation(host, tasks[number], full)

    def row(number: int, task: Any) -> dict[str, Any]:
        first = Session(begin(number), script).look()
        assert first is not None
        key = task.with_data(idx=None).key
        return {
            "number": number,
            "prompt": first.prompt,
            "key": key,
            "text": question(first.prompt) + key,
        }

    def problem(row: dict[str, Any]) -> Problem:
        number = row["number"]
        return Problem(row["prompt"], None, number, {"task": number}, hidden=row["key"])

    rows = [row(number, task) for number, task in enumerate(tasks)]
    if len(rows) < 2:
        raise ProxpoError(f"task {full} has {len(rows)} tasks: one to train on and one to hold out")
    train, test = split_by_hash(rows, share=held_out, key="text")
    return Task(
        name=full,
        train=[problem(row) for row in train],
        test=[problem(row) for row in test],
        reward=EARNED,
        template=template or {},
        environment=sessions(lambda problem: begin(problem.extra["task"]), script),
        max_turns=attempts * max_turns,
        folds=fold,
    )


def _environment(
    package: Any, name: str, env: str, config: dict[str, Any], max_turns: int
) -> tuple[Any, str]:
    """The environment of a taskset, and the name of its one seat, set to chat on this machine."""
    kind = package.env_config_type(name, env)
    seats = [
        field
        for field, info in kind.model_fields.items()
        if isinstance(info.default, package.AgentConfig)
    ]
    if len(seats) != 1:
        raise ValueError(f"it seats {', '.join(seats)}; one policy plays alone")
    if package.default_harness_id(name) == name:
        raise ValueError("it brings a harness of its own; the policy plays as a plain chat")
    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": max_turns}
    settings = {
        "id": env,
        "taskset": {**config, "id": name},
        "interception": {"type": "server"},
        seats[0]: seat,
    }
    return package.load_environment(package.resolve_env_config(settings)), seats[0]


def _chat_harness(package: Any, http: Any) -> type:
    """The package's chat without tools, in this process."""
    null = importlib.import_module("verifiers.v1.harnesses.null").NullHarness

    class ChatHarness(null):  # type: ignore[valid-type, misc]
        SUPPORTS_MCP = False
        SUPPORTS_TOOL_INTERCEPTION = False

        async def setup(self, runtime: Any) -> None:
            """Needs nothing in the runtime."""

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [] if system is None else [{"role": "system", "content": system}]
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message.model_dump(exclude_none=True) for message in prompt or []]
            request = http.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
            async with request as reply:
                text = await reply.text()
            return package.ProgramResult(int(not reply.ok), "", text)

    return ChatHarness


def _refusal(name: str, reason: object) -> ProxpoError:
    hub = (
        " (an environment of the hub is installed first: prime env install OWNER/NAME)"
        if isinstance(reason, ModuleNotFoundError)
        else ""
    )
    words = " ".join(str(reason).split())[:300] or type(reason).__name__
    return ProxpoError(f"task {name}: {words}{hub}")


__all__ = ["Conversation", "Host", "verifiers"]
