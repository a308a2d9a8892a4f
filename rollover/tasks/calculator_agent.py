"""A program that has a model work a sum out with a calculator: the agent of the packaged experiment ``agent``."""

import json
import os
import re
import urllib.request
from typing import Any


def post(route: str, content: Any) -> Any:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + route, json.dumps(content).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def solve(row: Any) -> None:
    """Ask until the reply asks for nothing, and post whether its last line is right."""
    messages, text = [{"role": "user", "content": f"{row['question']}\n"}], "="
    while text.endswith("="):
        try:
            completion = post("/chat/completions", {"model": "rollover", "messages": messages})
        except OSError:  # there is no room for another turn
            break
        reply = completion["choices"][0]["message"]
        text = reply["content"].rstrip()
        found = re.search(r"(-?\d{1,9}) ([-+]) (-?\d{1,9}) =$", text)
        answer = int(found[1]) + int(found[2] + "1") * int(found[3]) if found else "?"
        messages += [reply, {"role": "user", "content": f" {answer}\n"}]
    post("/reward", {"reward": float(text.rpartition("#### ")[2] == row["answer"])})
