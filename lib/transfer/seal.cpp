#include "transfer/seal.h"

#include <openssl/evp.h>

#include "base/assert.h"

namespace di::transfer {

namespace {

const unsigned char* raw(const std::byte* bytes) {
  return reinterpret_cast<const unsigned char*>(bytes);
}
unsigned char* raw(std::byte* bytes) {
  return reinterpret_cast<unsigned char*>(bytes);
}

const EVP_CIPHER* cipher() {
  static const EVP_CIPHER* algorithm = EVP_CIPHER_fetch(nullptr, "AES-256-GCM", nullptr);
  DI_ASSERT(algorithm != nullptr);
  return algorithm;
}

// Pieces are at most a frame, far below what an int holds.
int length_of(std::size_t bytes) {
  DI_ASSERT(bytes <= (1u << 30));
  return static_cast<int>(bytes);
}

struct Context {
  Context(const SealKey& key, SealDirection which, bool encrypt)
      : context(EVP_CIPHER_CTX_new()), direction(which), encrypting(encrypt ? 1 : 0) {
    DI_ASSERT(context != nullptr);
    DI_ASSERT(EVP_CipherInit_ex2(context, cipher(), key.data(), nullptr, encrypting, nullptr) == 1);
  }
  ~Context() { EVP_CIPHER_CTX_free(context); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  void begin(ByteView authenticated) {
    std::array<std::byte, 12> nonce;
    put_le<std::uint32_t>(nonce.data(), static_cast<std::uint32_t>(direction));
    put_le<std::uint64_t>(nonce.data() + 4, messages);
    ++messages;
    DI_ASSERT(EVP_CipherInit_ex2(context, nullptr, nullptr, raw(nonce.data()), encrypting, nullptr) == 1);
    int done = 0;
    if (!authenticated.empty()) {
      DI_ASSERT(EVP_CipherUpdate(context, nullptr, &done, raw(authenticated.data()),
                                 length_of(authenticated.size())) == 1);
    }
  }
  void update(ByteView in, MutableByteView out) {
    DI_ASSERT(in.size() == out.size());
    int done = 0;
    DI_ASSERT(EVP_CipherUpdate(context, raw(out.data()), &done, raw(in.data()), length_of(in.size())) == 1);
    DI_ASSERT(static_cast<std::size_t>(done) == in.size());
  }

  EVP_CIPHER_CTX* context;
  const SealDirection direction;
  const int encrypting;
  std::uint64_t messages = 0;
};

}  // namespace

struct Sealer::State : Context {
  using Context::Context;
};

Sealer::Sealer(const SealKey& key, SealDirection direction)
    : state_(std::make_unique<State>(key, direction, true)) {}

Sealer::~Sealer() = default;

void Sealer::begin(ByteView authenticated) {
  state_->begin(authenticated);
}

void Sealer::update(ByteView text, MutableByteView sealed) {
  state_->update(text, sealed);
}

SealTag Sealer::finish() {
  SealTag tag;
  int done = 0;
  DI_ASSERT(EVP_CipherFinal_ex(state_->context, raw(tag.data()), &done) == 1 && done == 0);
  DI_ASSERT(EVP_CIPHER_CTX_ctrl(state_->context, EVP_CTRL_AEAD_GET_TAG, length_of(tag.size()), tag.data()) ==
            1);
  return tag;
}

struct Opener::State : Context {
  using Context::Context;
};

Opener::Opener(const SealKey& key, SealDirection direction)
    : state_(std::make_unique<State>(key, direction, false)) {}

Opener::~Opener() = default;

void Opener::begin(ByteView authenticated) {
  state_->begin(authenticated);
}

void Opener::update(ByteView sealed, MutableByteView text) {
  state_->update(sealed, text);
}

bool Opener::finish(const SealTag& tag) {
  SealTag expected = tag;  // the call wants memory that it could write
  DI_ASSERT(EVP_CIPHER_CTX_ctrl(state_->context, EVP_CTRL_AEAD_SET_TAG, length_of(expected.size()),
                                expected.data()) == 1);
  SealTag rest;
  int done = 0;
  return EVP_CipherFinal_ex(state_->context, raw(rest.data()), &done) == 1;
}

}  // namespace di::transfer
