"""`baton chat`: a conversation in the terminal, through the resuming client.

Replies go to stdout, everything else to stderr. Ctrl-C stops a reply on the server too; an empty line
is skipped; the end of the input or `/exit` ends the conversation.
"""

import sys
from collections.abc import Iterator
from typing import TextIO

import httpx

from cli.errors import CommandError
from cli.terminal import say
from client import ChatStream, RequestRefused, StreamError

_TIMEOUT = httpx.Timeout(60.0, connect=5.0)  # longer than a keepalive interval


def chat(url: str, api_key: str, max_tokens: int, source: TextIO) -> None:
    """Reads questions line by line until the input ends.

    Raises:
        CommandError: no gateway answers at the address, or it wants another key.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT, trust_env=False) as http:
        say(f"{_model(http)} at {url}; Ctrl-C stops a reply, Ctrl-D ends")
        messages: list[dict[str, str]] = []
        for question in _questions(source):
            messages.append({"role": "user", "content": question})
            answer = _ask(http, messages, max_tokens)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _model(http: httpx.Client) -> str:
    try:
        response = http.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        hint = ": set BATON_API_KEY or --api-key" if status in (401, 403) else ""
        raise CommandError(f"{http.base_url} answers {status} to /v1/models{hint}") from error
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise CommandError(f"no gateway answers at {http.base_url}: {error}") from error


def _questions(source: TextIO) -> Iterator[str]:
    interactive = source.isatty()
    while True:
        if interactive:
            print("> ", end="", file=sys.stderr, flush=True)
        line = source.readline()
        if not line or line.strip() == "/exit":
            return
        if line.strip():
            yield line.strip()


def _ask(http: httpx.Client, messages: list[dict[str, str]], max_tokens: int) -> str | None:
    """The reply's text, or None if there is none that the conversation could go on from."""
    with ChatStream(http, {"messages": messages, "max_tokens": max_tokens}) as stream:
        try:
            for piece in stream:
                print(piece, end="", flush=True)
            print(flush=True)
        except KeyboardInterrupt:
            print(flush=True)
            _cancel(http, stream.reply_id)
            return stream.text or None
        except RequestRefused as error:
            say(f"refused: {error}")
            return None
        except StreamError as error:
            print(flush=True)
            say(f"the reply is incomplete: {error}")
            return None
        if stream.num_resumes:
            say(f"(resumed {stream.num_resumes} times)")
        return stream.text


def _cancel(http: httpx.Client, reply_id: str | None) -> None:
    if reply_id is None:
        return
    try:
        http.post(f"/v1/streams/{reply_id}/cancel").raise_for_status()
        say("(stopped)")
    except httpx.HTTPError as error:
        say(f"(could not be stopped on the server: {error})")
