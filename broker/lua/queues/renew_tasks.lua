#!lua flags=allow-oom
-- KEYS: TASKS EVAL_TASKS
-- ARGV: stream, generator, then entries. Renews the leases of those that are the generator's own; returns those that
-- another generator has claimed.
return renew_leases(({tasks = TASKS, eval_tasks = EVAL_TASKS})[ARGV[1]], GENERATORS)
