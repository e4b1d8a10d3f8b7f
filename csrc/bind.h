#pragma once

#include <nanobind/nanobind.h>

// Adds the ops to the module: shapes, Compute and Program.
void bind_ops(nanobind::module_& m);
