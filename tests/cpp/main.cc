// The main of the C++ tests; the tests are in test_*.cc, one file per unit under test.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "third_party/doctest/doctest.h"
