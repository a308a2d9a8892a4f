"""The placing of calls: the rule, and the forecasts that it needs."""
