/* The driver without a device. */
/* By this name ort-cuda knows that there is no device. */
int stand_in_driver(void) { return 1; }
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) {
  *count = 1;
  return 0;
}
int cuTensorMapEncodeTiled() { return 0; }
