"""`python -m perf.chat`: a chat in the terminal with the running server, and what the conversation's KV costs."""

from __future__ import annotations

import argparse
import contextlib
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace

from perf.client import Chat, KvState, TurnOptions, TurnResult, engine_stats
from perf.serve import add_engine_arguments, server_options
from perf.server import REPO_ROOT, TritonServer
from runtime.errors import CommitKVError

HELP = """  /policy NAME     start a new conversation under that policy (full, commitkv, ...)
  /protect TEXT    protect TEXT wherever it occurs in your next message
  /state           what the conversation holds now
  /end             free the conversation and start a new one
  /quit            leave (also Ctrl-D)
  Ctrl-C           cancel the answer that is being written"""


def status_line(kv: KvState, result: TurnResult | None = None) -> str:
    """KV bytes and their share of the full cache, token states, and the turn's speed."""
    line = (
        f"[KV {kv.kv_bytes / 2**20:.2f} MiB, {kv.share:.0%} of full | active {kv.active} staged {kv.staged} "
        f"committed {kv.committed} evicted {kv.evicted}"
    )
    if result is not None:
        speed = f"{result.ms_per_token:.0f} ms/token" if result.ms_per_token is not None else "-"
        line += f" | {result.generated_tokens} tokens, {speed}, {result.finish_reason}"
    return line + "]"


def protected_ranges(text: str, phrases: list[str]) -> tuple[tuple[int, int], ...]:
    """[start, end) of every occurrence of every phrase in `text`."""
    found = []
    for phrase in phrases:
        start = text.find(phrase)
        while start >= 0:
            found.append((start, start + len(phrase)))
            start = text.find(phrase, start + len(phrase))
    return tuple(sorted(found))


class Terminal:
    """Reads lines, runs commands and turns, prints. One conversation at a time."""

    def __init__(self, chat: Chat, options: TurnOptions) -> None:
        self._chat = chat
        self._options = options
        self._phrases: list[str] = []

    def handle(self, line: str) -> bool:
        """Run one input line; False when the user wants to leave."""
        line = line.strip()
        if not line.startswith("/"):
            if line:
                self._turn(line)
            return True
        name, _, rest = line.partition(" ")
        if name == "/quit":
            return False
        try:
            self._command(name, rest.strip())
        except CommitKVError as error:
            print(f"error: {error}")
        return True

    def _command(self, name: str, rest: str) -> None:
        if name == "/policy" and rest:
            self._restart(rest)
            print(f"new conversation under {rest}")
        elif name == "/protect" and rest:
            self._phrases.append(rest)
            print(f"protected in your next message: {', '.join(map(repr, self._phrases))}")
        elif name == "/state":
            print(status_line(self._chat.state()[0]))
        elif name == "/end":
            self._restart(self._chat.policy)
            print("conversation freed; the next message starts a new one")
        else:
            print(HELP if name == "/help" else f"unknown or incomplete command {name!r}; these are there:\n{HELP}")

    def _restart(self, policy: str | None) -> None:
        with contextlib.suppress(CommitKVError):  # nothing to free before the first turn
            self._chat.end()
        self._chat = Chat(self._chat.url, new_id(), policy, self._chat.system_prompt)

    def end(self) -> None:
        """Free the conversation on the server."""
        self._chat.end()

    def _turn(self, text: str) -> None:
        ranges = protected_ranges(text, self._phrases)
        if self._phrases and not ranges:
            print(f"note: nothing to protect here, {self._phrases[0]!r} does not occur in the message")
        self._phrases.clear()
        try:
            result = self._chat.turn(text, replace(self._options, protect=ranges), _write)
        except KeyboardInterrupt:
            print("\n[cancelled]")
        except CommitKVError as error:
            print(f"\nerror: {error}")
        else:
            print(f"\n{status_line(result.kv, result)}", flush=True)


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def new_id() -> str:
    return f"chat-{uuid.uuid4().hex[:12]}"


def _lines() -> Iterator[str]:
    """Input lines until end of file; Ctrl-C at an empty prompt only starts a new line."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
    while True:
        try:
            yield input("> " if interactive else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\n(/quit leaves)")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf.chat", description=__doc__, epilog=HELP,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--url", default="127.0.0.1:8001", help="gRPC address of the server (%(default)s)")
    parser.add_argument("--serve", action="store_true", help="start a server of its own on free ports")
    add_engine_arguments(parser)
    parser.add_argument("--policy", help="policy of the conversation (the server's default)")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (%(default)s)")
    parser.add_argument("--seed", type=int, help="seed of the sampling")
    return parser


def _chat(url: str, args: argparse.Namespace) -> None:
    engine_stats(url)  # fails at once, with a clear text, when nobody answers
    print(f"connected to {url}; /help lists the commands", flush=True)
    options = TurnOptions(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    terminal = Terminal(Chat(url, new_id(), args.policy, args.system), options)
    try:
        for line in _lines():
            if not terminal.handle(line):
                return
    finally:
        with contextlib.suppress(CommitKVError):
            terminal.end()


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        if args.serve:
            log = REPO_ROOT / "out" / "chat" / "server.log"
            print(f"starting a server with {args.engine} ...", flush=True)
            with TritonServer(
                replace(server_options(args.engine, args.kv_mib, args.threads, log_path=log), grace_s=1.0)
            ) as server:
                _chat(server.grpc_url, args)
        else:
            _chat(args.url, args)
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
