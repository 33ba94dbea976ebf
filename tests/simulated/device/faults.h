// What can be wrong with the copies from one device to another. Plain bytes; nothing of torch is needed here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace simulated {

enum class Kind {
  kZeros,      // every byte arrives as zero
  kUnwritten,  // nothing arrives: the destination keeps what its memory held
  kStale,      // what this pair carried the time before arrives again
  kPartial,    // the second half never arrives
  kPages,      // every second page never arrives
  kBitflip,    // one bit, a third of the way in, is inverted
  kShift,      // the payload lands some bytes too far on
  kSwap,       // the two halves change places
  kLate,       // the right bytes, but only after some kernels of the destination, or when the host synchronises
  kHang,       // the call does not come back
  kError,      // the call raises
  kAssert,     // the call raises, and so does everything that touches the destination afterwards
};

enum class Engine { kAny, kMemcpy, kKernel };

// Mirrored field by field by `FaultFields` in library.py.
struct Fault {
  int32_t source = 0;
  int32_t destination = 0;
  int32_t kind = 0;         // a Kind
  int32_t engine = 0;       // an Engine: only copies that this one makes
  int32_t dtype = -1;       // a c10::ScalarType: only payloads of this type; -1: all
  int64_t min_bytes = 0;    // only payloads of at least this many bytes
  int64_t every = 1;        // only every n-th of the copies that pass the filters above
  int64_t kernels = 4;      // kLate: arrives before this many-th kernel of the destination
  int64_t offset = 16;      // kShift: bytes
  int64_t page = 4096;      // kPages: bytes
  double seconds = 0;       // kHang: 0 means for ever
  int64_t passed = 0;       // copies that passed the filters so far
};

using Bytes = std::vector<char>;

// Whether this copy is hit. Counts the copies that pass the filters, so call it once for each copy.
bool hits(Fault& fault, Engine engine, int32_t dtype, int64_t size);

// What lies at the destination afterwards: `sent` are the right bytes, `held` what the destination held before, `last`
// what this pair carried the time before (empty: nothing yet). For the kinds that change bytes, kZeros to kSwap.
Bytes damaged(const Fault& fault, const Bytes& sent, const Bytes& held, const Bytes& last);

// Fresh device memory holds this in every byte: no float, index or mask of a test is made of it.
constexpr char kFreshByte = static_cast<char>(0xCD);

}  // namespace simulated
