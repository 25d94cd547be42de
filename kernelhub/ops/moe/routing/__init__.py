"""`route_experts`: which experts a token goes to, and with what weight; see `kernelhub.ops.moe`."""
