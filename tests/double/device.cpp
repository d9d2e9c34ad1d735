// The "hpu" device of the double: host memory that is tagged HPU, on stock CPU torch.
//
// An operator that Python calls on such tensors runs on CPU tensors that alias their memory, so views, in-place
// operators, storage offsets and data pointers are real; mixing devices is refused. What the device is documented to do
// otherwise is done here too: integers of 64 bits keep 32, doubles are floats (D-16), memory has a limit (D-22), one
// process holds a card (D-20), and an operator outside a compiled cluster is compiled by itself (D-15). Indices are not
// checked (D-27), and the compile-only mode launches nothing (D-17). Random numbers are drawn by generators of the
// device (D-30).
//
// Source, of the bridge: create_tensor.cpp and tensor_utils.cpp:390 (D-16), device.cpp:388-492 (D-20), habana_eager (D-15),
// HPUHooksInterface.cpp (D-30).
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/where.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {
using at::Tensor;
constexpr auto kHPU = c10::DeviceType::HPU;

std::string setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? value : otherwise;
}

std::mutex asked_mutex;
std::set<std::string> asked;  // For the journal.

bool has_fault(const std::string& name) {
  std::lock_guard<std::mutex> held(asked_mutex);
  asked.insert(name);
  return ("," + setting("AOTGAUDI_DOUBLE_FAULTS", "") + ",").find("," + name + ",") != std::string::npos;
}

std::vector<std::string> parts(const std::string& text) {
  std::vector<std::string> found;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');)
    if (!part.empty()) found.push_back(part);
  return found;
}

// D-20: HLS_MODULE_ID is the card to try first; the others that HABANA_VISIBLE_MODULES allows come after it.
class Card {
 public:
  void acquire() {
    std::lock_guard<std::mutex> held(mutex_);
    if (module_ >= 0) return;
    while (has_fault("hang")) sleep(1);
    const int count = std::stoi(setting("AOTGAUDI_DOUBLE_CARDS", "1"));
    TORCH_CHECK(count > 0, "Device acquire failed. No devices found.");
    const auto visible = setting("HABANA_VISIBLE_MODULES", "");
    auto candidates = parts(visible);
    if (visible.empty())
      for (int i = 0; i < count; ++i) candidates.push_back(std::to_string(i));
    const auto first = setting("HLS_MODULE_ID", "");
    if (!first.empty() && std::find(candidates.begin(), candidates.end(), first) != candidates.end())
      candidates.insert(candidates.begin(), first);
    for (const auto& module : candidates)
      if (std::stoi(module) < count && lock(module)) return;
    TORCH_CHECK(false, "Device acquire failed.");
  }
  int module() const { return module_; }

 private:
  bool lock(const std::string& module) {
    if (has_fault("busy-card")) return false;
    const auto state = setting("AOTGAUDI_DOUBLE_STATE", "");
    if (!state.empty()) {
      const int file = open((state + "/card" + module + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
      TORCH_CHECK(file >= 0, "AOTGAUDI_DOUBLE_STATE=", state, " cannot be written to");
      if (flock(file, LOCK_EX | LOCK_NB) != 0 && !has_fault("shared-card")) return close(file), false;
    }
    module_ = std::stoi(module);
    return true;
  }
  std::mutex mutex_;
  int module_ = -1;
} card;

struct Memory {
  int64_t in_use = 0, peak = 0, num_allocations = 0, num_frees = 0;
  const int64_t limit = std::stoll(setting("AOTGAUDI_DOUBLE_MEMORY_MIB", "4096")) << 20;
} memory;

struct Block {
  void* data;
  size_t size;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  memory.in_use -= block->size;
  ++memory.num_frees;
  std::free(block->data);
  delete block;
}

struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    card.acquire();
    TORCH_CHECK(memory.in_use + int64_t(size) <= memory.limit, "Allocation failed for size::", size);
    void* data = size ? aligned_alloc(128, (size + 127) / 128 * 128) : nullptr;
    memory.in_use += size;
    ++memory.num_allocations;
    memory.peak = std::max(memory.peak, memory.in_use);
    return {data, new Block{data, size}, &release, c10::Device(kHPU, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
} allocator;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kHPU> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(HPU, Guard)

const auto kKeys = c10::DispatchKeySet(c10::DispatchKey::HPU);

// D-30: a generator of the device. One of the CPU draws its numbers, which are not those of a card.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(at::Generator drawing)
      : c10::GeneratorImpl(c10::Device(kHPU, 0), kKeys), drawing(std::move(drawing)) {}
  void set_current_seed(uint64_t seed) override { drawing.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { drawing.set_offset(offset); }
  uint64_t get_offset() const override { return drawing.get_offset(); }
  uint64_t current_seed() const override { return drawing.current_seed(); }
  uint64_t seed() override { return drawing.seed(); }
  void set_state(const c10::TensorImpl& state) override { drawing.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return drawing.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(drawing.clone()); }
  at::Generator drawing;
};

at::Generator new_generator() { return at::make_generator<Generator>(at::detail::createCPUGenerator()); }

const at::Generator& default_generator() {
  static const auto generator = at::make_generator<Generator>(at::detail::getDefaultCPUGenerator());
  return generator;
}

// What torch asks of the device by itself. Host memory is never pinned.
struct HPUHooks final : at::HPUHooksInterface {
  explicit HPUHooks(at::HPUHooksArgs) {}
  void init() const override { card.acquire(); }
  bool hasHPU() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return deviceCount() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return card.module() >= 0; }
  c10::DeviceIndex deviceCount() const override { return std::stoi(setting("AOTGAUDI_DOUBLE_CARDS", "1")) > 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(kHPU, 0); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
};
using at::HPUHooksRegistry;
using at::RegistererHPUHooksRegistry;
REGISTER_HPU_HOOKS(HPUHooks)  // By this name torch finds it.

bool is_hpu(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kHPU; }

Tensor as_cpu(const Tensor& tensor) {
  const auto nbytes = tensor.storage().nbytes();
  if (!nbytes) return at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  const auto whole = at::from_blob(tensor.storage().mutable_data(), {int64_t(nbytes / tensor.element_size())},
                                   [tensor](void*) {}, at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  return at::as_strided(whole, tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

// D-16, on what has just been written.
void narrow(const Tensor& cpu) {
  if (cpu.scalar_type() == at::kLong) {
    const auto narrowed = cpu.to(at::kInt).to(at::kLong);
    if (!narrowed.equal(cpu) && !has_fault("no-int-narrowing")) cpu.copy_(narrowed);
  }
  if (cpu.scalar_type() == at::kDouble) cpu.copy_(cpu.to(at::kFloat));
}

std::atomic<bool> is_compile_only{false};  // D-17.

// In the compile-only mode new memory has garbage, the same each time.
Tensor soiled(const Tensor& made) {
  if (!is_compile_only || !made.storage().nbytes()) return made;
  std::memset(made.storage().mutable_data(), 0x7f, made.storage().nbytes());
  narrow(as_cpu(made));
  return made;
}

Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return soiled(
      at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, kKeys, dtype.value_or(at::kFloat), format));
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return soiled(at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                                  &allocator, kKeys, dtype.value_or(at::kFloat)));
}

// `cpu` as a tensor of the device: a view of the one of `sources` whose memory it shares, else a copy.
Tensor as_hpu(const Tensor& cpu, at::TensorList sources) {
  for (const auto& source : sources)
    if (is_hpu(source) && cpu.storage().data() && cpu.storage().data() == source.storage().data()) {
      auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(source.storage()),
                                                           source.key_set(), cpu.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
      return view;
    }
  const Tensor copy = at::detail::empty_strided_generic(cpu.sizes(), cpu.strides(), &allocator, kKeys, cpu.scalar_type());
  auto alias = as_cpu(copy);
  alias.copy_(cpu);
  narrow(alias);
  return copy;
}

std::mutex eager_mutex;
std::set<std::string> eager_cache;

// D-15: an operator that makes or writes a tensor is compiled at the first use with its types and sizes.
void compile_eagerly(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& args) {
  const auto& name = schema.name();
  if (name == "aten::_to_copy" || name == "aten::copy_" || name == "aten::_local_scalar_dense" ||
      name == "aten::resize_" || name == "aten::set_" || name == "aten::is_pinned")
    return;
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return;  // A view.
  TORCH_CHECK(!has_fault("eager-op-raises"), schema.name(), " ran on the device outside a compiled cluster");
  std::ostringstream key;
  key << name;
  for (const auto& arg : args)
    if (arg.isTensor() && arg.toTensor().defined()) key << ' ' << arg.toTensor().dtype() << arg.toTensor().sizes();
  std::lock_guard<std::mutex> held(eager_mutex);
  eager_cache.insert(key.str());
}

// D-27: indices are not checked, and negative ones count from the end; the CPU's operators refuse some.
void wrap_indices(const std::string& name, torch::jit::Stack* stack, size_t first) {
  static const std::set<std::string> indexed = {"aten::index_select", "aten::gather", "aten::index_copy",
                                                "aten::index_copy_", "aten::index_add", "aten::index_add_",
                                                "aten::index_reduce", "aten::index_reduce_"};
  const bool is_embedding = name == "aten::embedding";
  if (!is_embedding && !indexed.count(name)) return;
  if (has_fault("checked-indices")) return;
  auto& indices = (*stack)[first + (is_embedding ? 1 : 2)];
  const auto& sized = (*stack)[first].toTensor();
  const auto size = sized.dim() ? sized.size(is_embedding ? 0 : (*stack)[first + 1].toInt()) : 1;
  const auto given = indices.toTensor();
  indices = at::where(given.lt(0), given.add(size), given);
}

void push_results(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& args,
                  const std::vector<c10::IValue>& results, const std::vector<Tensor>& sources, bool wants_cpu,
                  torch::jit::Stack* stack) {
  for (size_t i = 0; i < results.size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    if (alias && alias->isWrite()) {  // In place, or out=.
      for (size_t j = 0; j < args.size(); ++j) {
        const auto* in = schema.arguments()[j].alias_info();
        if (in && in->isWrite() && in->beforeSets() == alias->beforeSets()) torch::jit::push(*stack, args[j]);
      }
    } else if (results[i].isTensor() && !wants_cpu) {
      const auto& tensor = results[i].toTensor();
      torch::jit::push(*stack, tensor.defined() ? as_hpu(tensor, sources) : Tensor());
    } else if (results[i].isTensorList() && !wants_cpu) {
      std::vector<Tensor> tensors;
      for (const auto& tensor : results[i].toTensorVector()) tensors.push_back(as_hpu(tensor, sources));
      torch::jit::push(*stack, tensors);
    } else {
      torch::jit::push(*stack, results[i]);
    }
  }
}

// An out= tensor that was resized, or resize_ itself: the memory grew under the alias.
void take_size(const Tensor& tensor, const Tensor& cpu) {
  if (tensor.sizes() == cpu.sizes()) return;
  const auto nbytes = cpu.storage().nbytes();
  if (tensor.storage().nbytes() < nbytes) {
    tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(allocator.allocate(nbytes));
    tensor.storage().unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  if (nbytes) std::memcpy(tensor.storage().mutable_data(), cpu.storage().data(), nbytes);
}

Tensor unset(const Tensor& meta) {
  return soiled(at::detail::empty_strided_generic(meta.sizes(), meta.strides(), &allocator, kKeys, meta.scalar_type()));
}

// D-17: in the compile-only mode no operator that computes is launched. What it writes stays as it was, what it makes is
// garbage, and no index is looked at. Shapes come from the operator's form without data; one that has none is run.
bool leaves_unset(const c10::OperatorHandle& op, const std::vector<c10::IValue>& args, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  for (const auto& result : schema.returns()) {
    const bool is_view = result.alias_info() && !result.alias_info()->isWrite();
    const auto kind = result.type()->kind();
    if (is_view || (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType)) return false;
  }
  static const std::set<std::string> copies = {"aten::_to_copy", "aten::copy_", "aten::resize_", "aten::set_",
                                               "aten::_copy_from_and_resize"};
  if (copies.count(schema.name())) return false;
  const auto as_meta = [](const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  };
  torch::jit::Stack metas;
  for (size_t i = 0; i < args.size(); ++i) {
    c10::IValue arg = args[i];
    if (arg.isTensor()) {
      arg = as_meta(arg.toTensor());
    } else if (arg.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const auto& tensor : arg.toTensorVector()) tensors.push_back(as_meta(tensor));
      arg = tensors;
    } else if (arg.isList() && schema.arguments()[i].type()->str().find("Tensor?[]") != std::string::npos) {
      c10::List<std::optional<Tensor>> tensors;
      for (const c10::IValue& item : arg.toListRef())
        tensors.push_back(item.isNone() ? std::optional<Tensor>() : std::optional<Tensor>(as_meta(item.toTensor())));
      arg = tensors;
    } else if (arg.isDevice()) {
      if (arg.toDevice().type() != kHPU) return false;
      arg = c10::Device(at::kMeta);
    } else if (arg.isGenerator()) {
      arg = c10::IValue();
    }
    metas.push_back(arg);
  }
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &metas);
  } catch (const std::exception&) {
    return false;
  }
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    if (alias && alias->isWrite()) {
      for (size_t j = 0; j < args.size(); ++j) {
        const auto* in = schema.arguments()[j].alias_info();
        if (!in || !in->isWrite() || in->beforeSets() != alias->beforeSets()) continue;
        if (metas[i].isTensor() && args[j].isTensor())  // An out= tensor may grow.
          take_size(args[j].toTensor(), as_cpu(unset(metas[i].toTensor())));
        torch::jit::push(*stack, args[j]);
      }
    } else if (metas[i].isTensor()) {
      torch::jit::push(*stack, unset(metas[i].toTensor()));
    } else {
      std::vector<Tensor> tensors;
      for (const auto& tensor : metas[i].toTensorVector()) tensors.push_back(unset(tensor));
      torch::jit::push(*stack, tensors);
    }
  }
  return true;
}

void run_eagerly(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const std::vector<c10::IValue> args(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  compile_eagerly(schema, args);
  if (is_compile_only && leaves_unset(op, args, stack)) return;
  std::vector<Tensor> sources, aliases;
  bool wants_cpu = false;
  const auto alias_of = [&](const Tensor& tensor) {
    if (!is_hpu(tensor)) return tensor;
    sources.push_back(tensor);
    aliases.push_back(as_cpu(tensor));
    return aliases.back();
  };
  const bool may_mix = schema.name() == "aten::_to_copy" || schema.name() == "aten::copy_";
  for (size_t i = 0; i < count; ++i) {
    c10::IValue arg = args[i];
    if (arg.isTensor()) {
      const auto& tensor = arg.toTensor();
      TORCH_CHECK(may_mix || !tensor.defined() || is_hpu(tensor) || tensor.dim() == 0, schema.name(),
                  ": a CPU tensor among HPU ones");
      arg = alias_of(tensor);
    } else if (arg.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const auto& tensor : arg.toTensorVector()) tensors.push_back(alias_of(tensor));
      arg = tensors;
    } else if (arg.isList() && schema.arguments()[i].type()->str().find("Tensor?[]") != std::string::npos) {
      c10::List<std::optional<Tensor>> tensors;
      for (const c10::IValue& item : arg.toListRef())
        tensors.push_back(item.isNone() ? std::optional<Tensor>() : std::optional<Tensor>(alias_of(item.toTensor())));
      arg = tensors;
    } else if (arg.isGenerator() && arg.toGenerator().device().type() == kHPU) {
      arg = arg.toGenerator().get<Generator>()->drawing;
    } else if (arg.isDevice()) {
      wants_cpu = arg.toDevice().type() != kHPU;
      arg = c10::Device(at::kCPU);
    }
    torch::jit::push(*stack, arg);
  }
  wrap_indices(schema.name(), stack, stack->size() - count);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t i = 0; i < sources.size(); ++i) take_size(sources[i], aliases[i]);
  const auto num_results = schema.returns().size();
  const std::vector<c10::IValue> results(stack->end() - num_results, stack->end());
  torch::jit::drop(*stack, num_results);
  for (size_t i = 0; i < count; ++i)
    if (args[i].isTensor() && is_hpu(args[i].toTensor()) && schema.arguments()[i].alias_info() &&
        schema.arguments()[i].alias_info()->isWrite())
      narrow(as_cpu(args[i].toTensor()));
  push_results(schema, args, results, sources, wants_cpu, stack);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (is_compile_only && is_hpu(from) && is_hpu(to)) return to;  // D-17: a copy on the device is a graph, too.
  const auto target = is_hpu(to) ? as_cpu(to) : to;
  target.copy_(is_hpu(from) ? as_cpu(from) : from);
  if (is_hpu(to)) narrow(target);
  return to;
}
}  // namespace

TORCH_LIBRARY_IMPL(_, HPU, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_eagerly>()); }
TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
}
TORCH_LIBRARY(hpu_double, m) {
  m.def("as_cpu(Tensor tensor) -> Tensor", &as_cpu);
  m.def("as_hpu(Tensor cpu, Tensor[] sources) -> Tensor", [](const Tensor& cpu, const std::vector<Tensor>& sources) {
    return as_hpu(cpu, sources);
  });
  m.def("default_generator() -> Generator?", []() { return std::optional<at::Generator>(default_generator()); });
  m.def("acquire() -> ()", []() { card.acquire(); });
  m.def("set_compile_only(bool value) -> ()", [](bool value) { is_compile_only = value; });
  m.def("module() -> int", []() { return int64_t(card.module()); });
  m.def("eager_cache_size() -> int", []() { return int64_t(eager_cache.size()); });
  m.def("asked() -> str[]", []() {
    std::lock_guard<std::mutex> held(asked_mutex);
    return std::vector<std::string>(asked.begin(), asked.end());
  });
  m.def("memory() -> int[]", []() {
    return std::vector<int64_t>{memory.limit, memory.in_use, memory.peak, memory.num_allocations, memory.num_frees};
  });
}
