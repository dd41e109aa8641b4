#!lua flags=allow-oom
-- KEYS: TRAJECTORIES
-- ARGV: stream, reward service, then entries. Renews the leases of those that are its own; returns those that another
-- reward service has claimed.
return renew_leases(TRAJECTORIES, REWARD)
