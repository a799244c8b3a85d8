#!/usr/bin/env bash
# The sender reads a document; the receiver answers a question about it. Needs both servers.
set -euo pipefail
sender=${SENDER:-http://127.0.0.1:30000}
receiver=${RECEIVER:-http://127.0.0.1:30001}
document=$(cat "$(dirname "$0")/document.txt")

curl -sSf "$sender/generate" -H 'Content-Type: application/json' -d '{
  "text": "<bos> '"$document"'",
  "sampling_params": {"temperature": 0, "max_new_tokens": 1}
}'
echo
sleep 1 # the sender publishes what it has read after it has answered

curl -sSf "$receiver/generate" -H 'Content-Type: application/json' -d '{
  "text": "<bos> '"$document"' question : what job has teral ?",
  "sampling_params": {"temperature": 0, "max_new_tokens": 8}
}'
echo

# A request that asks for no reuse reads none of what was loaded for others.
curl -sSf "$receiver/generate" -H 'Content-Type: application/json' -d '{
  "text": "<bos> '"$document"' question : what job has fefam ?",
  "sampling_params": {
    "temperature": 0, "max_new_tokens": 8,
    "custom_params": {"droidspeak": {"mode": "off"}}
  }
}'
echo
