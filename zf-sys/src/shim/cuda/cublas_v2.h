// Part of the declarations of CUDA's libraries that libtorch's headers name on the way to ProcessGroupNCCL.hpp, which needs
// none of their functions: with these the large packages of cuBLAS, cuSPARSE and cuSOLVER are not needed to compile.
#pragma once

typedef struct cublasContext* cublasHandle_t;
typedef enum { CUBLAS_STATUS_SUCCESS = 0 } cublasStatus_t;
