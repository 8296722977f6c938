#include "shmem_device_rma.h"
