// The namespace of one instruction set. CMake compiles kernel.cpp several times, each time with another name; an editor
// that opens a header alone uses the baseline. Headers of the kernel put everything into an unnamed namespace inside it
// and include nothing of the C++ standard library, for the reason in problem.h.
#pragma once

#ifndef LONGSPAN_ISA
#define LONGSPAN_ISA baseline
#endif
