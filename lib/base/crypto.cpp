#include "base/crypto.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include "base/assert.h"

namespace di {

namespace {

const EVP_MD* sha256_algorithm() {
  static const EVP_MD* algorithm = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  DI_ASSERT(algorithm != nullptr);
  return algorithm;
}

}  // namespace

struct Sha256::State {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~State() { EVP_MD_CTX_free(context); }
};

Sha256::Sha256() : state_(std::make_unique<State>()) {
  DI_ASSERT(state_->context != nullptr);
  DI_ASSERT(EVP_DigestInit_ex(state_->context, sha256_algorithm(), nullptr) == 1);
}

Sha256::~Sha256() = default;

void Sha256::update(ByteView bytes) {
  DI_ASSERT(EVP_DigestUpdate(state_->context, bytes.data(), bytes.size()) == 1);
}

Digest Sha256::finish() {
  Digest digest;
  DI_ASSERT(EVP_DigestFinal_ex(state_->context, reinterpret_cast<unsigned char*>(digest.data()), nullptr) ==
            1);
  DI_ASSERT(EVP_DigestInit_ex(state_->context, sha256_algorithm(), nullptr) == 1);
  return digest;
}

Digest sha256(ByteView bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.finish();
}

Digest hmac_sha256(ByteView key, ByteView bytes) {
  Digest digest;
  unsigned int length = 0;
  const auto* out = HMAC(sha256_algorithm(), key.data(), static_cast<int>(key.size()),
                         reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
                         reinterpret_cast<unsigned char*>(digest.data()), &length);
  DI_ASSERT(out != nullptr && length == digest.size());
  return digest;
}

void random_bytes(MutableByteView out) {
  std::size_t done = 0;
  while (done < out.size()) {
    const ssize_t n = getrandom(out.data() + done, out.size() - done, 0);
    DI_ASSERT(n > 0);
    done += static_cast<std::size_t>(n);
  }
}

std::uint64_t random_u64() {
  std::array<std::byte, 8> raw;
  random_bytes(raw);
  return get_le<std::uint64_t>(raw.data());
}

}  // namespace di
