// The kernels of one instruction set. CMake compiles this file several times, each time with other machine flags and
// another LONGSPAN_ISA, the namespace. dispatch.cpp chooses one at run time.
#include "backward.h"
#include "bias_gradient.h"
#include "forward_job.h"
#include "isa.h"
#include "problem.h"
#include "product.h"
#include "simd.h"

#define LONGSPAN_NAME_(x) #x
#define LONGSPAN_NAME(x) LONGSPAN_NAME_(x)

namespace longspan::LONGSPAN_ISA {
namespace {

bool forward(const Problem& p, const Forward& f, Runner& runner) {
  return p.type == F64 ? forward_of<double>(p, f, runner) : forward_of<float>(p, f, runner);
}

template <class R>
bool backward_of(const Problem& p, const Backward& g, Runner& runner) {
  BackwardJob<R> job(p, g);
  return job.run(runner);
}

bool backward(const Problem& p, const Backward& g, Runner& runner) {
  return p.type == F64 ? backward_of<double>(p, g, runner) : backward_of<float>(p, g, runner);
}

template <class R>
bool bias_gradient_of(const Problem& p, const BiasGradient& g, Runner& runner) {
  BiasGradientJob<R> job(p, g);
  return job.run(runner);
}

bool bias_gradient(const Problem& p, const BiasGradient& g, Runner& runner) {
  return p.type == F64 ? bias_gradient_of<double>(p, g, runner) : bias_gradient_of<float>(p, g, runner);
}

bool product(const Product& p, Runner& runner) {
  ProductJob job(p);
  return job.run(runner);
}

}  // namespace

extern const Kernel kernel;
const Kernel kernel = {LONGSPAN_NAME(LONGSPAN_ISA), kVectorBytes, forward, backward, bias_gradient, product};

}  // namespace longspan::LONGSPAN_ISA
