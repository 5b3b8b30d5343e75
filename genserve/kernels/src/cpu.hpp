// cpu.hpp: the instruction sets of this machine.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(_WIN32)
#include <windows.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

namespace genserve {

#if defined(__x86_64__)

struct Cpuid {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  Cpuid(uint32_t leaf, uint32_t subleaf) { __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx); }
};

// The registers that the operating system saves; it must support the processor's wide ones.
inline uint32_t saved_registers() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// Asks the operating system for AMX's registers, which Linux saves only for processes that have asked.
inline bool may_use_matrices() {
#if defined(__linux__)
  constexpr long kRequestState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestState, kTileData) == 0;
#else
  return false;
#endif
}

inline bool cpu_supports(const char* instruction_set) {
  const auto has = [](uint32_t word, uint32_t bits) { return (word & bits) == bits; };
  const auto bit = [](int n) { return uint32_t{1} << n; };
  if (strcmp(instruction_set, "portable") == 0) return true;
  const Cpuid basic(1, 0), extended(7, 0), more(7, 1), amd(0x80000001, 0);
  const bool avx2 = has(basic.ecx, bit(12) | bit(22) | bit(27) | bit(28) | bit(29)) &&  // FMA MOVBE OSXSAVE AVX F16C
                    has(extended.ebx, bit(3) | bit(5) | bit(8)) && has(amd.ecx, bit(5)) &&  // BMI1 AVX2 BMI2, LZCNT
                    has(saved_registers(), 0x06);
  if (!avx2 || strcmp(instruction_set, "avx2") == 0) return avx2;
  if (strcmp(instruction_set, "avxvnni") == 0) return has(more.eax, bit(4));
  const bool avx512vnni = has(extended.ebx, bit(16) | bit(17) | bit(28) | bit(30) | bit(31)) &&  // AVX512 F DQ CD BW VL
                          has(extended.ecx, bit(11)) && has(saved_registers(), 0xe6);
  if (!avx512vnni || strcmp(instruction_set, "avx512vnni") == 0) return avx512vnni;
  return strcmp(instruction_set, "amx") == 0 && has(extended.edx, bit(24) | bit(25)) &&  // AMX TILE INT8
         has(saved_registers(), 0x600e6) && may_use_matrices();
}

#else

inline bool cpu_supports(const char* instruction_set) {
  if (strcmp(instruction_set, "portable") == 0) return true;
  if (strcmp(instruction_set, "neon") != 0) return false;
#if defined(__APPLE__)
  return true;  // since the M1
#elif defined(_WIN32)
  return IsProcessorFeaturePresent(43);  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
#else
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#endif
}

#endif

}  // namespace genserve
