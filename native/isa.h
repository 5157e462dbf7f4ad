// The namespace of one instruction set: CMake compiles kernel.cpp several times and gives each object its own name, and
// an editor that opens a header alone sees the baseline. Headers of the kernel keep everything in an unnamed namespace
// inside it and include nothing of the C++ standard library: problem.h says why.
#pragma once

#ifndef LONGSPAN_ISA
#define LONGSPAN_ISA baseline
#endif
