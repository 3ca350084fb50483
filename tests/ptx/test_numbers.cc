// Arithmetic of PTX instructions against plain loops over bits and the oracle's 16-bit floats.
#include <random>

#include "ptx/bits.h"
#include "ptx/numbers.h"
#include "reduce_oracle.h"
#include "third_party/doctest/doctest.h"

namespace {

namespace oracle = ringcomm::oracle;
using namespace ringcomm::ptx;

TEST_CASE("numbers: 16-bit floats are those of the oracle") {
  std::mt19937 random(1);
  for (u32 bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<u16>(bits);
    const float of_f16 = oracle::kFormatFloat16.decode(half);
    const float of_bf16 = oracle::kFormatBFloat16.decode(half);
    if (is_nan(of_f16))
      CHECK(is_nan(to_float(f16{half})));
    else
      CHECK(to_float(f16{half}) == of_f16);
    if (!is_nan(of_bf16)) CHECK(to_float(bf16{half}) == of_bf16);
    // Numbers around it, so that ties and the limits of the exponent are among them.
    for (const float number : {of_f16, of_bf16}) {
      if (is_nan(number)) continue;
      const auto near =
          std::bit_cast<float>(std::bit_cast<u32>(number) + static_cast<u32>(random() & 0x1ffff));
      if (is_nan(near)) continue;
      CHECK(round_to<f16>(near).bits == oracle::kFormatFloat16.encode(near));
      CHECK(round_to<bf16>(near).bits == oracle::kFormatBFloat16.encode(near));
    }
  }
  CHECK(round_to<bf16>(std::bit_cast<float>(0x7f812345u)).bits == 0x7fff);
  CHECK(round_to<f16>(std::bit_cast<float>(0xffc00000u)).bits == 0x7fff);
}

TEST_CASE("numbers: fields of bits, shifts and tables bit by bit") {
  std::mt19937_64 random(2);
  const auto bit = [](u64 word, u32 i) { return static_cast<u32>(word >> i & 1); };
  for (int turn = 0; turn < 3000; ++turn) {
    const u64 wide = random();
    const auto a = static_cast<u32>(random()), b = static_cast<u32>(random());
    const u32 position = turn % 40, length = turn / 40 % 40, table = turn % 256;
    u32 inserted = b, extracted = 0, looked_up = 0;
    for (u32 i = 0; i < length && position + i < 32; ++i) {
      inserted = (inserted & ~(1u << (position + i))) | bit(a, i) << (position + i);
      extracted |= bit(a, position + i) << i;
    }
    for (u32 i = 0; i < 32; ++i) {
      const u32 index = 4 * bit(a, i) + 2 * bit(b, i) + bit(wide, i);
      looked_up |= bit(table, index) << i;
    }
    CHECK(bfi<u32>(a, b, position, length) == inserted);
    CHECK(bfe<u32>(a, position, length) == extracted);
    CHECK(lop3(a, b, static_cast<u32>(wide), table) == looked_up);
    const u64 joined = u64{b} << 32 | a;
    CHECK(shf_r(a, b, clamp(position)) == static_cast<u32>(position < 32 ? joined >> position : b));
    CHECK(shf_l(a, b, wrap(position)) == static_cast<u32>(joined << (position & 31) >> 32));
  }
  CHECK(bfe<s32>(0x0000f000, 12, 4) == -1);
  CHECK(bfe<s32>(static_cast<s32>(0x80000000), 28, 8) == -8);
  CHECK(prmt(0x33221100, 0x77665544, 0x0123) == 0x00112233);
  CHECK(prmt(0x80000000, 0, 0x000b) == 0x000000ff);
  CHECK(shr<s32>(-5, 40) == -1);
  CHECK(shl<u32>(1, 32) == 0);
}

TEST_CASE("numbers: minima, comparisons and conversions at their edges") {
  const float nan = std::bit_cast<float>(0x7fc01234u);
  CHECK(std::bit_cast<u32>(add(nan, 1.0F)) == 0x7fffffff);
  CHECK(min(nan, 1.0F) == 1.0F);
  CHECK(is_nan(min_nan(nan, 1.0F)));
  CHECK(std::signbit(min(0.0F, -0.0F)));
  CHECK(!std::signbit(max(-0.0F, 0.0F)));
  CHECK(!ordered<float>(std::not_equal_to<>(), nan, 1.0F));
  CHECK(unordered<float>(std::less<>(), nan, 1.0F));
  CHECK(to_integer<s32>(rzi(-2.7)) == -2);
  CHECK(to_integer<s32>(1e20) == 2147483647);
  CHECK(to_integer<u32>(-1.0) == 0);
  CHECK(to_integer<s32>(rni(2.5)) == 2);
  CHECK(cvt_sat<u8>(s32{300}) == 255);
  CHECK(cvt_sat<s8>(u32{300}) == 127);
  CHECK(mul_hi<s64>(-1, 1) == -1);
  CHECK(mul_hi<u64>(~u64{0}, 2) == 1);
  CHECK(mul_wide<s32>(-3, 1 << 30) == -3 * (s64{1} << 30));
  const s16x2 least = min(s16x2{-3, 4}, s16x2{2, -5});
  CHECK((least.low == -3 && least.high == -5));
  u64 wide = 0;
  set(wide, s16{-2});
  CHECK(wide == ~u64{1});
  CHECK(flush(std::bit_cast<float>(0x80000001u)) == 0);
}

}  // namespace
