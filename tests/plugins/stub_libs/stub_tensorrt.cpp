// Stands for libnvinfer.so.11, libnvinfer_plugin.so.11 and libnvonnxparser.so.11: what TensorRT's Python bindings look
// up when they are imported. Nothing can be built or run; the bindings' own classes are real.
extern "C" {
void *createInferBuilder_INTERNAL() { return nullptr; }
void *createInferRefitter_INTERNAL() { return nullptr; }
void *createInferRuntime_INTERNAL() { return nullptr; }
void *createNvOnnxParser_INTERNAL() { return nullptr; }
void *createNvOnnxParserRefitter_INTERNAL() { return nullptr; }
void *getBuilderPluginRegistry() { return nullptr; }
void *getPluginRegistry() { return nullptr; }
int getNvOnnxParserVersion() { return 0; }
bool initLibNvInferPlugins() { return false; }
}
