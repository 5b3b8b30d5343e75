#!/bin/sh
# curl: a streamed chat, an answer as JSON of a schema, and what the server says about itself.
set -eu
url=${GENSERVE_URL:-http://127.0.0.1:8000}

curl -fsSN "$url/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
  "temperature": 0, "max_tokens": 16, "stream": true
}'

curl -fsS "$url/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "temperature": 0,
  "messages": [{"role": "user", "content": "Is Paris in France?"}],
  "structured_outputs": {"choice": ["yes", "no"]}
}'
echo

curl -fsS "$url/v1/models"
echo
