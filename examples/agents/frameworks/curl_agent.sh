#!/bin/sh
# A calculator with curl and jq. Runs against any server: OPENAI_BASE_URL, OPENAI_API_KEY, MODEL.
# As an agent's command it reads the task from the file TIDEMILL_TASK, and writes its reward to TIDEMILL_RESULT.
set -eu
question=${1:-$(jq -r '.messages[-1].content' "$TIDEMILL_TASK")}
# The body of the first request. Every other one has two messages more: the call, and its result.
body=$(jq -nc --arg model "${MODEL:-policy}" --arg text "$question" '{
    model: $model,
    messages: [{role: "user", content: $text}],
    tools: [{type: "function", function: {name: "multiply", description: "Multiply two whole numbers.", parameters: {
        type: "object", properties: {a: {type: "integer"}, b: {type: "integer"}}, required: ["a", "b"]}}}]}')
answer=
for _ in 1 2 3 4; do
    message=$(printf %s "$body" | curl -fsS "$OPENAI_BASE_URL/chat/completions" \
        -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" -d @- |
        jq -c '.choices[0].message')
    if printf %s "$message" | jq -e '(.tool_calls // []) == []' > /dev/null; then
        answer=$(printf %s "$message" | jq -r '.content // ""')
        break
    fi
    # What is wrong with a call is its result.
    body=$(printf %s "$body" | jq -c --argjson message "$message" '.messages += [$message] + [
        $message.tool_calls[] | {role: "tool", tool_call_id: .id,
            content: (try (.function.arguments | fromjson | .a * .b | tostring) catch "error: \(.)")}]')
done
echo "$answer"
if [ -n "${TIDEMILL_RESULT:-}" ]; then
    jq -n --arg answer "$answer" --slurpfile task "$TIDEMILL_TASK" \
        'if $answer == $task[0].data.answer then 1 else 0 end' > "$TIDEMILL_RESULT"
fi
