#!/bin/sh
# Talk to `longspec serve` with curl. LONGSPEC_URL says where it is, LONGSPEC_KEY which key it wants, if any.
set -eu
url="${LONGSPEC_URL:-http://127.0.0.1:8000}"

ask() {
    curl -sS --fail-with-body "$url$1" -H "Content-Type: application/json" -H "Authorization: Bearer ${LONGSPEC_KEY:-none}" -d "$2"
    echo
}

ask /v1/chat/completions '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 30}'
ask /v1/chat/completions '{"messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 20, "stream": true}'
ask /v1/completions '{"prompt": "Once upon a time", "max_tokens": 10, "n": 2, "temperature": 0.9, "seed": 1}'
curl -sS "$url/health" "$url/metrics" | head -n 20
