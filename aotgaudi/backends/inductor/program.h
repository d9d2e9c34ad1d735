// Runs the calls of a program, one unit after another, without the interpreter. See runtime.py.
//
// Every unit has this function in addition to torch's interface (toolchain.py); a process uses any unit's. While it runs, other
// threads have the interpreter.
#ifndef AOTGAUDI_PROGRAM
#define AOTGAUDI_PROGRAM
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

extern "C" {

// Of torch/csrc/inductor/aoti_torch/c/shim.h, torch's interface for compiled code.
struct AtenTensorOpaque;
typedef AtenTensorOpaque* AtenTensorHandle;
int32_t aoti_torch_new_tensor_handle(AtenTensorHandle original, AtenTensorHandle* handle);
int32_t aoti_torch_delete_tensor_object(AtenTensorHandle handle);

// One call: its tensors are in numbered slots.
struct AotgaudiCall {
  int32_t (*run)(void* container, AtenTensorHandle* inputs, size_t num_inputs, AtenTensorHandle* outputs,
                 size_t num_outputs, void* stream, void* proxy);
  void* container;
  const int32_t* inputs;
  const int32_t* outputs;
  int64_t num_inputs;
  int64_t num_outputs;
};

// Returns 0, and handles of the tensors in the slots `outputs`, which the caller owns; or the error of the call that failed.
// In both cases it frees the tensors in the slots `transient` and leaves these empty.
__attribute__((visibility("default"))) int32_t aotgaudi_run(
    const AotgaudiCall* calls, int64_t num_calls, AtenTensorHandle* slots, const int32_t* transient,
    int64_t num_transient, const int32_t* outputs, int64_t num_outputs, AtenTensorHandle* results) {
  int32_t error = 0;
  const auto drop = [](AtenTensorHandle& slot) {
    if (slot != nullptr) aoti_torch_delete_tensor_object(slot);
    slot = nullptr;
  };
  for (int64_t c = 0; c < num_calls && error == 0; ++c) {
    const AotgaudiCall& call = calls[c];
    std::vector<AtenTensorHandle> given(call.num_inputs, nullptr), found(call.num_outputs, nullptr);
    for (int64_t i = 0; i < call.num_inputs && error == 0; ++i)
      error = aoti_torch_new_tensor_handle(slots[call.inputs[i]], &given[i]);
    if (error != 0) {
      for (auto& handle : given) drop(handle);
      break;
    }
    try {
      error = call.run(call.container, given.data(), given.size(), found.data(), found.size(), nullptr, nullptr);
    } catch (const std::exception& exception) {  // From checks that run before the unit's code.
      std::fprintf(stderr, "Error: %s\n", exception.what());
      error = 1;
    }
    for (int64_t i = 0; i < call.num_outputs; ++i) {
      drop(slots[call.outputs[i]]);
      slots[call.outputs[i]] = found[i];
    }
  }
  for (int64_t i = 0; i < num_outputs && error == 0; ++i)
    error = aoti_torch_new_tensor_handle(slots[outputs[i]], &results[i]);
  for (int64_t i = 0; i < num_transient; ++i) drop(slots[transient[i]]);
  return error;
}

}  // extern "C"
#endif
