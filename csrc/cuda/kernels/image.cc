#include "cuda/kernels/image.h"

#ifdef RINGCOMM_CUDA_IMAGES
// The build defines the folder with nvcc's output for each file.
#define RINGCOMM_EMBED(name)                                                          \
  __asm__(".pushsection .rodata\n.balign 16\nringcomm_image_" #name                   \
          ":\n.incbin \"" RINGCOMM_CUDA_IMAGES "/" #name ".fatbin\"\n.popsection\n"); \
  extern "C" const char ringcomm_image_##name[];

RINGCOMM_EMBED(reduction_kernels)
RINGCOMM_EMBED(update_kernels)
RINGCOMM_EMBED(other_kernels)
RINGCOMM_EMBED(loss_kernels)
#endif

namespace ringcomm::cuda {

std::span<const void* const> kernel_images() {
#ifdef RINGCOMM_CUDA_IMAGES
  static const void* const images[] = {ringcomm_image_reduction_kernels,
                                       ringcomm_image_update_kernels, ringcomm_image_other_kernels};
  return images;
#else
  return {};
#endif
}

std::span<const void* const> loss_kernel_images() {
#ifdef RINGCOMM_CUDA_IMAGES
  static const void* const images[] = {ringcomm_image_loss_kernels};
  return images;
#else
  return {};
#endif
}

}  // namespace ringcomm::cuda
