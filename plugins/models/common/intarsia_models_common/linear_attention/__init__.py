"""Linear attention: mixers whose past is a state of fixed size. `short_conv` and `delta_rule` are the mathematics, `operators` what kernels may replace, `updates` what contexts call, `mixer` the
component. Nothing here knows of parallelism."""
