# Zig's clang, C library headers and libc++, for wheels: it links against the glibc of an old distribution, whatever is
# here, and for other processors. ZIG: its program. PENSTOCK_TARGET: such as x86_64-linux-gnu.2.28.
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ZIG PENSTOCK_TARGET)
set(CMAKE_SYSTEM_NAME Linux)
string(REGEX REPLACE "-.*" "" CMAKE_SYSTEM_PROCESSOR "${PENSTOCK_TARGET}")
# Without -g0 zig writes debug information, ten times the code. It builds a libc++ for each kind of code: without -fPIC
# CMake's check of the compiler would have another one than the extension.
set(CMAKE_CXX_FLAGS_INIT "-g0 -fPIC")
# Each tool is one program, which ccache asks for.
function(tool file words)
  file(WRITE "${CMAKE_BINARY_DIR}/${file}" "#!/bin/sh\nexec '${ZIG}' ${words} \"$@\"\n")
  file(CHMOD "${CMAKE_BINARY_DIR}/${file}" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
endfunction()
tool(zig-clang "cc -target ${PENSTOCK_TARGET}")
tool(zig-clang++ "c++ -target ${PENSTOCK_TARGET}")
set(CMAKE_C_COMPILER "${CMAKE_BINARY_DIR}/zig-clang")
set(CMAKE_CXX_COMPILER "${CMAKE_BINARY_DIR}/zig-clang++")
foreach(tool ar ranlib)
  string(TOUPPER ${tool} name)
  tool(zig-${tool} ${tool})
  set(CMAKE_${name} "${CMAKE_BINARY_DIR}/zig-${tool}")
  set(CMAKE_CXX_COMPILER_${name} "${CMAKE_BINARY_DIR}/zig-${tool}")
endforeach()
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
