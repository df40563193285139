"""Short forms of the load driver, the soak and the fuzz against a real server with a tiny engine."""

from __future__ import annotations

import asyncio

import pytest

from perf.load.driver import Driver, DriverOptions
from perf.load.fuzz import fuzz
from perf.load.outcomes import Bound, summarize
from perf.load.plan import Workload, make_plan
from perf.load.soak import SoakOptions, end_and_look, soak
from perf.load.turn_stream import Patience, Requests, Target, turn_values
from perf.server import TritonServer

pytestmark = pytest.mark.triton

SMALL = Workload(
    sessions=3, ramp_s=1.0, duration_s=7.0, tokens=300, growth_turns=2, talk_words=6, answer_tokens=6,
    tool_think_s=0.1, user_think_s=0.4, cancel_share=0.1,
)  # fmt: skip


def http_of(server: TritonServer) -> tuple[str, int]:
    host, port = server.http_url.split(":")
    return host, int(port)


def test_a_plan_runs_and_leaves_nothing(url: str) -> None:
    plan = make_plan(SMALL)
    run = asyncio.run(Driver(plan, DriverOptions("tiny", policy="commitkv", sample_s=0.5)).run(Target(url)))
    summary = summarize(run, Bound(ttft_s=60.0, itl_s=60.0))
    assert summary.errors == () and set(summary.outcomes) <= {"ok", "left", "unfinished"}
    assert summary.outcomes["ok"] >= 3 and run.digest == plan.digest
    first = next(turn for turn in run.turns if turn.outcome == "ok" and turn.number == 0)
    assert first.first_s is not None and first.due_s <= first.sent_s <= first.first_s <= first.end_s
    assert first.prompt_tokens > 50 and first.generated_tokens >= 1 and first.kv_bytes > 0
    later = [turn for turn in run.turns if turn.outcome == "ok" and turn.number > 0]
    assert all(turn.reused_tokens > 0 for turn in later)
    assert max(sample.open for sample in run.samples) == 3 and max(sample.held for sample in run.samples) >= 1
    # The plan may end in the middle of a turn, whose conversation goes at a step boundary after its end.
    assert set(asyncio.run(_left_behind(url)).values()) == {0}


async def _left_behind(url: str) -> dict[str, int]:
    async with Requests(Target(url)) as requests:
        return await end_and_look(requests, ())


def test_a_turn_that_is_left_is_undone_and_the_next_one_waits_for_that(url: str) -> None:
    async def talk() -> None:
        async with Requests(Target(url)) as requests:
            left = await requests.ask(turn_values("hello", "left", 1500), "", Patience(60.0, leave_after_pieces=2))
            assert left.status == "left" and len(left.piece_s) == 2
            again = await requests.ask_after_leaving(turn_values("hello", "left", 4), "", Patience(60.0))
            assert again.status == "ok" and again.turn["reused_tokens"] == 0
            assert (await requests.end("left")).status == "ok"
            unknown = await requests.end("left")
            assert unknown.status == "refused" and "conversation" in unknown.error
            late = await requests.ask(turn_values("hello", "late", 1500), "", Patience(60.0, deadline_s=0.3))
            assert late.status == "left"

    asyncio.run(talk())


def test_a_server_that_is_not_there_is_unreachable() -> None:
    async def ask() -> str:
        async with Requests(Target("127.0.0.1:9")) as requests:
            return (await requests.stats()).status

    assert asyncio.run(ask()) == "unreachable"


def test_a_short_soak_sees_only_what_it_provoked(server: TritonServer) -> None:
    options = SoakOptions(seconds=6.0, clients=4, sample_s=0.5, server_pid=server.pid)
    report, memory = asyncio.run(soak(Target(server.grpc_url), options, http_of(server)))
    assert report.problems == () and report.num_problems == 0
    assert set(report.left_behind.values()) == {0}
    assert sum(report.actions.values()) >= 4 and len(memory) >= 3
    assert all(sample.model_bytes > 2**20 and sample.server_bytes > 2**20 for sample in memory)


def test_a_short_fuzz_is_answered_and_leaves_nothing(server: TritonServer) -> None:
    report = asyncio.run(fuzz(Target(server.grpc_url), http_of(server), count=120, seed=5, unnamed=False))
    assert report.faults == () and report.failures == ()
    assert report.replies["result"] > 5 and report.replies["error"] > 5
