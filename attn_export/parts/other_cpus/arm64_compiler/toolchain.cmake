# Programs for Linux on arm64, which CMake and CTest run on an emulated CPU: $QEMU_CPU.
get_filename_component(runtimes "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
set(tools "${CMAKE_CURRENT_LIST_DIR}/bin/aarch64-linux-gnu-")

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER "${tools}gcc")
set(CMAKE_CXX_COMPILER "${tools}g++")
set(CMAKE_AR "${tools}ar" CACHE FILEPATH "Archiver")
set(CMAKE_RANLIB "${tools}ranlib" CACHE FILEPATH "Indexer of archives")
set(CMAKE_CROSSCOMPILING_EMULATOR "${runtimes}/cpus/qemu-aarch64" -L "${runtimes}/cpus/aarch64")
set(ONNXRUNTIME_ROOT "${CMAKE_CURRENT_LIST_DIR}/onnxruntime" CACHE PATH "ONNX Runtime for arm64")
