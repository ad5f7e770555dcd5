/* cuRAND: the provider links to it and calls nothing of it. */
int stand_in_curand(void) { return 0; }
