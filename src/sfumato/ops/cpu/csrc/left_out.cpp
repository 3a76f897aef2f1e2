// Stands for the levels that a build for one machine leaves out (setup.py): values without functions, which
// no call gets to.

#include "level.h"

#if defined(SF_NO_PORTABLE)
const Level PORTABLE_LEVEL = {};
#endif
#if defined(__x86_64__)
#if defined(SF_NO_AVX2)
const Level AVX2_LEVEL = {};
#endif
#if defined(SF_NO_AVX_VNNI)
const Level AVX_VNNI_LEVEL = {};
#endif
#if defined(SF_NO_AVX512)
const Level AVX512_LEVEL = {};
const Products AVX512_BF16_PRODUCTS = {};
const Attention AVX512_BF16_ATTENTION = {};
#endif
#if defined(SF_NO_AMX)
const Products AMX_PRODUCTS = {};
#endif
#endif
