"""The state machine of members, calls, versions and placing: no network, no clock, no engine, no file."""
