"""Asks the model by its endpoint and by FD 3, and stays with what it was answered."""

import http.client
import json
import os
import sys
import time

host, key = os.environ["OPENAI_BASE_URL"].split("/")[2], os.environ["OPENAI_API_KEY"]
body = {
    "model": "m",
    "max_tokens": 500,
    "messages": [{"role": "user", "content": "!leak"}],
}
heard = []
for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
    if path == "/v1/responses":
        body = {"model": "m", "input": "!leak"}
    line = http.client.HTTPConnection(host)
    line.request("POST", path, json.dumps(body), {"Authorization": f"Bearer {key}"})
    heard.append(line.getresponse().read())
os.write(3, b"LLM_CHAT false 0 0 5 7\n!leakgeneral")
heard.append(os.read(3, 65_536))
sys.stdout.write(f"{[b'[redacted]' in one for one in heard]}\n")
sys.stdout.flush()
time.sleep(1000)
