# One library a folder, from the files that lie in it:
#   x.cc        always              x_test.cc   into <folder>_test
#   x_cuda.cu, x_cuda.cc  with LOCKSTEP_CUDA
#                                   x_bench.cc  into <folder>_bench
#   x_cuda_bench.cc  with LOCKSTEP_CUDA into cuda_bench, of all folders together
#   main.cc     the program         x_fuzz.cc   an executable x_fuzz of its own
# The suffix decides, so CPU and CUDA builds share one rule and there is no list to keep.

# Half of the time to compile a test goes into optimizing it, under sanitizers more, and it is not got
# back. And gtest takes a second to read: once for all tests.
function(lockstep_test_options target)
  if(NOT TARGET gtest_header)
    file(CONFIGURE OUTPUT gtest_header.cc CONTENT "")
    add_library(gtest_header OBJECT ${PROJECT_BINARY_DIR}/gtest_header.cc)
    target_link_libraries(gtest_header PRIVATE GTest::gtest)
    target_compile_options(gtest_header PRIVATE -Og)
    target_precompile_headers(gtest_header PRIVATE <gtest/gtest.h>)
  endif()
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Og>)
  target_precompile_headers(${target} REUSE_FROM gtest_header)
endfunction()

function(lockstep_folder name)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS src/${name}/*.cc)
  set(tests ${sources})
  set(benches ${sources})
  set(fuzzers ${sources})
  list(FILTER sources EXCLUDE REGEX "(_(test|bench|fuzz)|/main)\\.cc$")
  list(FILTER tests INCLUDE REGEX "_test\\.cc$")
  list(FILTER benches INCLUDE REGEX "_bench\\.cc$")
  list(FILTER benches EXCLUDE REGEX "_cuda_bench\\.cc$")
  list(FILTER fuzzers INCLUDE REGEX "_fuzz\\.cc$")
  if(NOT LOCKSTEP_CUDA)
    list(FILTER sources EXCLUDE REGEX "_cuda\\.cc$")
  else()
    file(GLOB_RECURSE cuda CONFIGURE_DEPENDS src/${name}/*_cuda.cu)
    # They read torch whole: as one file of their own, so that nobody waits for it at a first run.
    file(GLOB_RECURSE apart CONFIGURE_DEPENDS src/${name}/*_cuda.cc)
    if(apart)
      set_source_files_properties(${sources} PROPERTIES UNITY_GROUP main)
      set_source_files_properties(${apart} PROPERTIES UNITY_GROUP cuda)
    endif()
    list(APPEND sources ${cuda})
  endif()

  if(sources)
    add_library(${name} STATIC ${sources})
    if(apart)
      set_target_properties(${name} PROPERTIES UNITY_BUILD_MODE GROUP)
    endif()
    target_link_libraries(${name} PUBLIC ${ARGN})
  else()
    add_library(${name} INTERFACE)
    target_link_libraries(${name} INTERFACE ${ARGN})
  endif()
  if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/src/${name}/main.cc)
    add_executable(lockstep_${name} src/${name}/main.cc)
    target_link_libraries(lockstep_${name} PRIVATE ${name})
    set_target_properties(lockstep_${name} PROPERTIES OUTPUT_NAME lockstep)
  endif()
  if(NOT LOCKSTEP_TESTS)
    return()
  endif()
  if(tests)
    add_executable(${name}_test ${tests})
    target_link_libraries(${name}_test PRIVATE ${name} GTest::gtest_main)
    lockstep_test_options(${name}_test)
    gtest_discover_tests(${name}_test DISCOVERY_MODE PRE_TEST TEST_PREFIX "${LOCKSTEP_TEST_PREFIX}"
                         WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} PROPERTIES TIMEOUT 600)
  endif()
  if(benches AND NOT LOCKSTEP_SANITIZE)
    add_executable(${name}_bench ${benches})
    target_link_libraries(${name}_bench PRIVATE ${name} benchmark::benchmark_main)
  endif()
  foreach(source IN LISTS fuzzers)
    lockstep_fuzzer(${name} ${source})
  endforeach()
endfunction()

# x_fuzz.cc defines LLVMFuzzerTestOneInput. With LOCKSTEP_FUZZ (clang) libFuzzer drives it; else it
# replays its corpus, tests/corpus/x/, as a test.
function(lockstep_fuzzer name source)
  get_filename_component(target ${source} NAME_WE)
  string(REGEX REPLACE "_fuzz$" "" corpus ${target})
  add_executable(${target} ${source})
  target_link_libraries(${target} PRIVATE ${name})
  if(LOCKSTEP_FUZZ)
    target_link_options(${target} PRIVATE -fsanitize=fuzzer)
  else()
    target_sources(${target} PRIVATE ${PROJECT_SOURCE_DIR}/tests/replay_corpus.cc)
    add_test(NAME ${LOCKSTEP_TEST_PREFIX}${target} COMMAND ${target} ${PROJECT_SOURCE_DIR}/tests/corpus/${corpus})
  endif()
endfunction()

# Makes every folder of layers.txt that is there, linked to the floors below and its neighbours.
function(lockstep_house)
  file(STRINGS src/layers.txt lines REGEX "^[0-9] ")
  foreach(line IN LISTS lines)
    string(REGEX MATCH "^([0-9]) ([a-z]+):(.*)$" _ "${line}")
    set(floor ${CMAKE_MATCH_1})
    set(name ${CMAKE_MATCH_2})
    separate_arguments(links UNIX_COMMAND "${CMAKE_MATCH_3}")
    foreach(link IN LISTS links)
      if(NOT TARGET ${link})  # a folder that is yet to come
        list(REMOVE_ITEM links ${link})
      endif()
    endforeach()
    if(NOT floor EQUAL above)
      list(APPEND below ${here})
      set(here "")
      set(above ${floor})
    endif()
    if(name IN_LIST LOCKSTEP_WITHOUT OR NOT IS_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/src/${name})
      continue()
    endif()
    lockstep_folder(${name} ${links} ${below})
    # Where headers are dearer to compile than what stands in the files, many files are compiled as
    # one. So names in their anonymous namespaces must differ within a folder.
    if(floor GREATER 1)
      set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
    endif()
    list(APPEND here ${name})
  endforeach()
endfunction()

# Every x_cuda_bench.cc in one program, since what a card can do is measured once for all.
function(lockstep_cuda_bench)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS src/*_cuda_bench.cc tools/bench/*_cuda_bench.cc)
  add_executable(cuda_bench tools/bench/cuda_bench.cc ${sources})
  target_link_libraries(cuda_bench PRIVATE ${ARGN})
  # What tools/h200.sh -n calls its figures by: of this program, wherever it is taken.
  add_custom_command(
    TARGET cuda_bench POST_BUILD WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} VERBATIM
    COMMAND sh -c "git describe --always --dirty >\"$1\" 2>/dev/null || rm -f \"$1\"" sh
            ${CMAKE_BINARY_DIR}/commit)
endfunction()

# What crosses folders: tests/x_test.cc an executable each, tests/x_test.py under pytest,
# tests/x_test.sh with the build folder as its argument. They take longest, so they begin first: COST.
function(lockstep_tests)
  file(GLOB sources CONFIGURE_DEPENDS tests/*_test.cc)
  file(GLOB scripts CONFIGURE_DEPENDS tests/*_test.sh)
  file(GLOB_RECURSE pythons CONFIGURE_DEPENDS tests/*_test.py src/*_test.py)
  foreach(source IN LISTS sources)
    get_filename_component(name ${source} NAME_WE)
    if(TARGET ${name})
      continue()  # it has what it links to beside its add_executable
    endif()
    add_executable(${name} ${source})
    target_link_libraries(${name} PRIVATE ${ARGN} GTest::gtest_main)
    lockstep_test_options(${name})
    # Tests with Nightly in their names are for ./lockstep test --all.
    gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
                         TEST_FILTER "-*Nightly*" PROPERTIES TIMEOUT 900 COST 10)
    file(STRINGS ${source} nightly REGEX "Nightly" LIMIT_COUNT 1)
    if(nightly)
      gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
                           TEST_FILTER "*Nightly*" TEST_LIST ${name}_nightly
                           PROPERTIES TIMEOUT 1800 LABELS nightly)
    endif()
  endforeach()
  foreach(script IN LISTS scripts)
    get_filename_component(name ${script} NAME_WE)
    add_test(NAME ${name} COMMAND bash ${script} ${PROJECT_BINARY_DIR}
             WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    set_tests_properties(${name} PROPERTIES TIMEOUT 900 COST 20)
  endforeach()
  foreach(python IN LISTS pythons)
    get_filename_component(name ${python} NAME_WE)
    add_test(NAME py.${name} COMMAND ${LOCKSTEP_TEST_PYTHON} -m pytest -q -p no:cacheprovider ${python}
             WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    # 5: pytest found no test, that is all of a file's were skipped.
    set_tests_properties(py.${name} PROPERTIES TIMEOUT 1200 COST 30 SKIP_RETURN_CODE 5
                         ENVIRONMENT "LOCKSTEP_BUILD=${PROJECT_BINARY_DIR};PYTHONDONTWRITEBYTECODE=1")
  endforeach()
endfunction()
