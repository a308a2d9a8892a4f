"""A program that has a model work a sum out with a calculator: the agent of the packaged experiment ``agent``. It knows
no more of the training than the address of the model and where to post a reward."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

_ASKED = re.compile(r"(-?\d{1,9}) ([-+]) (-?\d{1,9}) =$")


def post(route: str, content: Mapping[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + route, json.dumps(content).encode(), headers)
    with urllib.request.urlopen(request) as response:
        found: dict[str, Any] = json.load(response)
    return found


def solve(row: Mapping[str, Any]) -> None:
    """Ask until the reply asks for nothing, and post whether its last line is right."""
    messages, reply = [{"role": "user", "content": f"{row['question']}\n"}], ""
    while not messages[1:] or reply.endswith("="):
        try:
            completion = post("/chat/completions", {"model": "rollover", "messages": messages})
        except urllib.error.HTTPError:  # there is no room for another turn
            break
        reply = completion["choices"][0]["message"]["content"].rstrip()
        found = _ASKED.search(reply)
        sign = -1 if found and found[2] == "-" else 1
        answer = str(int(found[1]) + sign * int(found[3])) if found else "?"
        messages += [completion["choices"][0]["message"], {"role": "user", "content": f" {answer}\n"}]
    post("/reward", {"reward": float(reply.rpartition("#### ")[2] == row["answer"])})
