#!/bin/sh
# One question with curl and jq. Runs against any server: OPENAI_BASE_URL, OPENAI_API_KEY, MODEL.
# As an agent's command it reads the task from the file TIDEMILL_TASK, and writes its reward to TIDEMILL_RESULT.
set -eu
question=${1:-$(jq -r '.messages[-1].content' "$TIDEMILL_TASK")}
answer=$(jq -n --arg model "${MODEL:-policy}" --arg text "$question" \
    '{model: $model, messages: [{role: "user", content: $text}]}' |
    curl -fsS "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
        -H "Content-Type: application/json" -d @- |
    jq -r '.choices[0].message.content')
echo "$answer"
if [ -n "${TIDEMILL_RESULT:-}" ]; then
    jq -n --arg answer "$answer" --slurpfile task "$TIDEMILL_TASK" \
        'if $answer == $task[0].data.answer then 1 else 0 end' > "$TIDEMILL_RESULT"
fi
