#include "faults.h"

#include <algorithm>

namespace simulated {
namespace {

constexpr char kFlippedBit = 0x10;

Bytes repeated(const Bytes& last, size_t size) {
  Bytes arrived(size, kFreshByte);
  if (!last.empty()) {
    for (size_t i = 0; i < size; ++i) arrived[i] = last[i % last.size()];
  }
  return arrived;
}

Bytes with_holes(Bytes sent, const Bytes& held, size_t page) {
  for (size_t start = page; start < sent.size(); start += 2 * page) {
    const size_t end = std::min(start + page, sent.size());
    std::copy(held.begin() + start, held.begin() + end, sent.begin() + start);
  }
  return sent;
}

Bytes displaced(const Bytes& sent, Bytes held, size_t offset) {
  // A payload no longer than the offset would not arrive at all, which is kUnwritten: move it by half its length.
  offset = std::min(offset, std::max<size_t>(1, sent.size() / 2));
  std::copy(sent.begin(), sent.end() - offset, held.begin() + offset);
  return held;
}

Bytes exchanged(const Bytes& sent) {
  Bytes arrived = sent;
  const size_t half = sent.size() / 2;
  // An odd byte in the middle stays where it is.
  std::copy(sent.end() - half, sent.end(), arrived.begin());
  std::copy(sent.begin(), sent.begin() + half, arrived.end() - half);
  return arrived;
}

}  // namespace

bool hits(Fault& fault, Engine engine, int32_t dtype, int64_t size) {
  const auto wanted = static_cast<Engine>(fault.engine);
  if (size == 0 || size < fault.min_bytes) return false;
  if (wanted != Engine::kAny && wanted != engine) return false;
  if (fault.dtype >= 0 && fault.dtype != dtype) return false;
  return ++fault.passed % fault.every == 0;
}

Bytes damaged(const Fault& fault, const Bytes& sent, const Bytes& held, const Bytes& last) {
  switch (static_cast<Kind>(fault.kind)) {
    case Kind::kZeros:
      return Bytes(sent.size(), 0);
    case Kind::kUnwritten:
      return held;
    case Kind::kStale:
      return repeated(last, sent.size());
    case Kind::kPartial: {
      Bytes arrived = held;
      std::copy(sent.begin(), sent.begin() + sent.size() / 2, arrived.begin());
      return arrived;
    }
    case Kind::kPages:
      return with_holes(sent, held, static_cast<size_t>(fault.page));
    case Kind::kBitflip: {
      Bytes arrived = sent;
      arrived[sent.size() / 3] ^= kFlippedBit;
      return arrived;
    }
    case Kind::kShift:
      return displaced(sent, held, static_cast<size_t>(fault.offset));
    case Kind::kSwap:
      return exchanged(sent);
    case Kind::kLate:
    case Kind::kHang:
    case Kind::kError:
    case Kind::kAssert:
      break;  // the link itself does these: they are about when and whether, not about bytes
  }
  return sent;
}

}  // namespace simulated
