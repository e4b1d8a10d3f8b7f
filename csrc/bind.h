#pragma once

#include <nanobind/nanobind.h>

// Shapes, Compute and Program.
void bind_ops(nanobind::module_& m);
