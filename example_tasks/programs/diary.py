"""A program that has its model keep a diary. It knows nothing of Inspect, nor of training."""

import json
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

# OPENAI_BASE_URL and OPENAI_API_KEY say where the model is.
client = OpenAI(max_retries=10)
days, request = int(sys.argv[1]), sys.argv[2]

messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": request}]
with open("diary.jsonl", "w") as diary:
    for day in range(1, days + 1):
        reply = client.chat.completions.create(model="inspect", messages=messages)
        entry = reply.choices[0].message.content or ""
        print(json.dumps(entry), file=diary)
        messages.append({"role": "assistant", "content": entry})
        messages.append({"role": "user", "content": f"Day {day + 1}."})
