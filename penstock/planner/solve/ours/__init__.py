"""The solvers of penstock's own plans: `ram` without a device, `device` beside one."""
