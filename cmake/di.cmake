# Functions that declare modules, programs and tests.  Links between modules come from lib/LAYERS.

# Reads lib/LAYERS into DI_MODULES (in order) and DI_NEEDS_<module>.
file(STRINGS ${CMAKE_SOURCE_DIR}/lib/LAYERS layers_lines REGEX "^[a-z]+:")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/lib/LAYERS)
set(DI_MODULES "")
foreach(line IN LISTS layers_lines)
  string(REGEX MATCH "^([a-z]+):(.*)$" _ "${line}")
  set(name ${CMAKE_MATCH_1})
  string(REGEX REPLACE "#.*$" "" needs "${CMAKE_MATCH_2}")
  string(STRIP "${needs}" needs)
  string(REGEX REPLACE " +" ";" needs "${needs}")
  list(APPEND DI_MODULES ${name})
  set(DI_NEEDS_${name} ${needs})
endforeach()

# di_module(NAME SOURCES ... [LIBS third-party ...]): static library di_NAME.
function(di_module name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS" ${ARGN})
  add_library(di_${name} STATIC ${ARG_SOURCES})
  target_include_directories(di_${name} PUBLIC ${CMAKE_SOURCE_DIR}/lib)
  foreach(need IN LISTS DI_NEEDS_${name})
    target_link_libraries(di_${name} PUBLIC di_${need})
  endforeach()
  target_link_libraries(di_${name} PRIVATE ${ARG_LIBS})
endfunction()

# di_program(di-NAME SOURCES ... LIBS ...): executable build/bin/di-NAME.
function(di_program name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_LIBS})
endfunction()

# di_unit_test(MODULE SOURCES ... [LIBS ...]): one binary per module, label `unit`.
function(di_unit_test module)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS" ${ARGN})
  add_executable(unit_${module} ${ARG_SOURCES})
  target_include_directories(unit_${module} PRIVATE ${CMAKE_SOURCE_DIR})
  target_compile_definitions(unit_${module} PRIVATE DI_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  target_link_libraries(unit_${module} PRIVATE di_${module} ${ARG_LIBS} GTest::gtest_main)
  add_test(NAME unit.${module} COMMAND unit_${module})
  set_tests_properties(unit.${module} PROPERTIES LABELS unit TIMEOUT 600)
endfunction()

find_package(GTest REQUIRED)
